"""Weights whose columns multiply the inputs in another order (``GroupInt.columns``)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmrun.errors import UnavailableError
from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import GroupInt
from llmrun.kernels.ops import Expert, Linear, Norm, Span
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.quant.dequantize import dequantize

Fill = Callable[[CpuArray, torch.Tensor], CpuArray]
Read = Callable[[CpuArray], torch.Tensor]
K, N = 192, 40


def made(bits: int, seed: int, columns: torch.Tensor | None, n: int = N, k: int = K) -> GroupInt:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, generator=generator)
    scales = 0.01 + torch.rand(n, k // 32, generator=generator)
    order = None if columns is None else to_host(columns.int())
    return GroupInt(bits, 32, to_host(codes), to_host(scales), None, (n, k), columns=order)


def shuffled(seed: int, k: int = K) -> torch.Tensor:
    return torch.randperm(k, generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step_of(backend: Any, tokens: int) -> Any:
    step = backend.step(256)
    step.set([0] * tokens, [Span(0, 0, tokens, 0)], [])
    return step


@pytest.mark.parametrize("bits", [4, 8])
def test_the_reference_multiplies_what_it_dequantizes(bits: int) -> None:
    form, x = made(bits, 1, shuffled(2)), randn(5, K, seed=3)
    backend, out = TorchBackend("cpu", 1), torch.zeros(5, N)
    backend.linear_add(step_of(backend, 5), x, Linear(backend.weight(form)), None, out)
    weight = as_tensor(dequantize(form)).double()
    torch.testing.assert_close(out.double(), x.double() @ weight.T, rtol=1e-5, atol=1e-4)
    # A weight without columns weighs input columns[j] where this one does.
    plain = as_tensor(dequantize(made(bits, 1, None)))
    assert torch.equal(weight.float()[:, shuffled(2)], plain)


@pytest.mark.parametrize("tokens", [1, 5, 37, 200])
@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_the_product_of_reordered_inputs(
    cpu: CpuBackend, fill: Fill, read: Read, bits: int, tokens: int
) -> None:
    columns, x = shuffled(4), randn(tokens, K, seed=5)
    results = []
    for form, inputs in ((made(bits, 1, columns), x), (made(bits, 1, None), x[:, columns])):
        source = fill(cpu.empty((256, K)), inputs)
        out = fill(cpu.empty((256, N)), torch.zeros(tokens, N))
        cpu.linear_add(step_of(cpu, tokens), source, Linear(cpu.weight(form)), None, out)
        results.append(read(out)[:tokens])
    assert torch.equal(*results)


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("seeds", [(6, 6, 6), (6, 6, 7), (6, None, 7)])
def test_queries_keys_and_values_may_differ(
    cpu: CpuBackend, fill: Fill, read: Read, tokens: int, seeds: tuple[int | None, ...]
) -> None:
    h, gamma = randn(tokens, K, seed=8), randn(K, seed=9)
    forms = [made(8, i, None if s is None else shuffled(s)) for i, s in enumerate(seeds)]
    plain = TorchBackend("cpu", 1)
    outs = fill(cpu.empty((256, 3 * N)), torch.zeros(tokens, 3 * N)), torch.zeros(tokens, 3 * N)
    inputs = fill(cpu.empty((256, K)), h), h
    for side, x, y in zip((cpu, plain), inputs, outs, strict=True):
        linears = [Linear(side.weight(form)) for form in forms]
        norm = Norm(side.vector(to_host(gamma)), 1e-5)
        side.norm_linear(step_of(side, tokens), x, norm, linears, y)  # type: ignore[arg-type]
    error = (read(outs[0])[:tokens] - outs[1]).norm() / outs[1].norm()
    assert float(error) < 1e-3


@pytest.mark.parametrize("tokens", [1, 37])
def test_gate_and_up_share_an_order(cpu: CpuBackend, fill: Fill, read: Read, tokens: int) -> None:
    h, plain = 0.01 * randn(tokens, K, seed=8), TorchBackend("cpu", 1)
    forms = [made(8, i, shuffled(6)) for i in (1, 2)]
    outs = fill(cpu.empty((256, N)), torch.zeros(tokens, N)), torch.zeros(tokens, N)
    inputs = fill(cpu.empty((256, K)), h), h
    for side, x, a in zip((cpu, plain), inputs, outs, strict=True):
        gate, up = (Linear(side.weight(form)) for form in forms)
        side.norm_gate_up(step_of(side, tokens), x, None, gate, up, "silu", a)  # type: ignore[arg-type]
    error = (read(outs[0])[:tokens] - outs[1]).norm() / outs[1].norm()
    assert float(error) < 1e-3


def test_what_is_not_served_is_refused(cpu: CpuBackend, fill: Fill) -> None:
    h, a = fill(cpu.empty((256, K)), randn(1, K, seed=8)), cpu.empty((256, N))
    one, other = (Linear(cpu.weight(made(8, 1, shuffled(seed)))) for seed in (1, 2))
    with pytest.raises(UnavailableError, match="two orders"):
        cpu.norm_gate_up(step_of(cpu, 1), h, None, one, other, "silu", a)
    norm = Norm(cpu.vector(to_host(torch.ones(K))), 1e-5)
    expert = Expert(one, one, Linear(cpu.weight(made(8, 1, None, K, N - 8))))
    with pytest.raises(UnavailableError, match="experts with reordered columns"):
        cpu.moe_add(step_of(cpu, 1), h, norm, one, [expert], 1, True, "silu")
