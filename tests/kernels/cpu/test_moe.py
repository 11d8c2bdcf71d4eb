"""``moe_add`` against the reference, and against the backend's own ops one expert at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import Backend, Expert, Linear, Norm, Span
from llmrun.kernels.reference.backend import TorchBackend

Fill = Callable[[CpuArray, torch.Tensor], CpuArray]
Read = Callable[[CpuArray], torch.Tensor]
WIDTH, INNER, N_EXPERTS, TOP_K = 64, 96, 5, 2
EPS = 1e-6


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def host(values: torch.Tensor, dtype: DType = DType.F32) -> HostArray:
    raw = values.contiguous().view(torch.uint8).flatten().numpy().tobytes()
    return HostArray(dtype, tuple(values.shape), memoryview(bytearray(raw)))


FORMS = ("f32", "bf16", "int4", "int8", "int8 g16", "lut4", "mxfp4")
MXFP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def form(kind: str, n: int, k: int, seed: int) -> Form:
    """A random weight whose entries are about 0.3 in size; ``mixed``: in one of FORMS by seed."""
    if kind == "mixed":
        return form(FORMS[seed % len(FORMS)], n, k, seed)
    if kind == "f32":
        return Dense(host(randn(n, k, seed=seed) * 0.3))
    if kind == "bf16":
        return Dense(host((randn(n, k, seed=seed) * 0.3).bfloat16(), DType.BF16))
    bits, group = 8 if kind.startswith("int8") else 4, 16 if kind.endswith("g16") else 32
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (n, k * bits // 8), generator=generator).to(torch.uint8)
    sizes = randn(n, k // group, seed=seed + 1).abs()
    if kind == "mxfp4":
        scales = host((2.0 ** (sizes - 4).round()).bfloat16(), DType.BF16)
        return Lut16(32, host(raw, DType.U8), host(torch.tensor(MXFP4)), scales, (n, k))
    scales = host((sizes * 2.0**-bits).half(), DType.F16)
    if kind == "lut4":
        return Lut16(32, host(raw, DType.U8), host(torch.linspace(-8, 8, 16)), scales, (n, k))
    return GroupInt(bits, group, host(raw, DType.U8), scales, None, (n, k))


def mixture(backend: Backend, kind: str, n_experts: int = N_EXPERTS) -> tuple[Linear, list[Expert]]:
    def linear(n: int, k: int, seed: int) -> Linear:
        held = backend.weight(form(kind, n, k, seed))
        return Linear(held, backend.vector(host(randn(n, seed=seed + 500) * 0.1)))

    experts = [
        Expert(linear(INNER, WIDTH, 10 * e), linear(INNER, WIDTH, 10 * e + 3),
               linear(WIDTH, INNER, 10 * e + 6))
        for e in range(n_experts)
    ]  # fmt: skip
    router = backend.weight(form("f32" if kind == "mixed" else kind, n_experts, WIDTH, 900))
    return Linear(router, backend.vector(host(randn(n_experts, seed=1400) * 0.1))), experts


def added(
    cpu: CpuBackend,
    fill: Fill,
    read: Read,
    kind: str,
    n_tokens: int,
    normalize: bool,
    activation: str = "silu",
) -> torch.Tensor:
    router, experts = mixture(cpu, kind)  # type: ignore[arg-type]
    h = fill(cpu.empty((n_tokens, WIDTH)), randn(n_tokens, WIDTH, seed=1))
    step = cpu.step(n_tokens)
    step.set([0] * n_tokens, [Span(0, 0, n_tokens, 0)], [])
    norm = Norm(cpu.vector(host(randn(WIDTH, seed=2))), EPS)
    cpu.moe_add(step, h, norm, router, experts, TOP_K, normalize, activation)
    return read(h)


@pytest.fixture
def exact(isa: str) -> CpuBackend:
    """A backend that multiplies all tables in fp32."""
    return CpuBackend(2, isa=isa, huge_pages=False, exact=True)


@pytest.mark.parametrize("n_tokens", [1, 3, 50])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["f32", "bf16", "lut4", "mxfp4", "int8"])
def test_the_sum_of_experts_is_that_of_the_reference(
    exact: CpuBackend, fill: Fill, read: Read, kind: str, normalize: bool, n_tokens: int
) -> None:
    plain = TorchBackend("cpu", 1)
    router, experts = mixture(plain, kind)
    want = randn(n_tokens, WIDTH, seed=1)
    step = plain.step(n_tokens)
    step.set([0] * n_tokens, [Span(0, 0, n_tokens, 0)], [])
    norm = Norm(randn(WIDTH, seed=2), EPS)
    plain.moe_add(step, want, norm, router, experts, TOP_K, normalize, "silu")
    got = added(exact, fill, read, kind, n_tokens, normalize)
    # 16-bit activations beside int8 weights.
    tolerance = 2e-3 if kind == "int8" else 1e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize(("n_experts", "top_k"), [(8, 8), (16, 4), (128, 1)])
@pytest.mark.parametrize("n_tokens", [1, 300])
def test_few_and_many_experts(
    exact: CpuBackend, fill: Fill, read: Read, n_tokens: int, n_experts: int, top_k: int
) -> None:
    start, gamma = randn(n_tokens, WIDTH, seed=1), host(randn(WIDTH, seed=2))
    plain: Any = TorchBackend("cpu", 1)
    sides: tuple[Any, ...] = (exact, plain)
    results = []
    for side in sides:
        router, experts = mixture(side, "mxfp4", n_experts)
        step, h = side.step(n_tokens), start.clone()
        if side is exact:
            h = fill(exact.empty((n_tokens, WIDTH)), start)
        step.set([0] * n_tokens, [Span(0, 0, n_tokens, 0)], [])
        norm = Norm(side.vector(gamma), EPS)
        side.moe_add(step, h, norm, router, experts, top_k, True, "swiglu_clamped", 0.5)
        results.append(read(h) if side is exact else h)
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5 * float(results[1].abs().max()))


@pytest.mark.parametrize("n_tokens", [1, 9, 50])
@pytest.mark.parametrize(("kind", "activation"), [("int4", "silu"), ("mixed", "swiglu_clamped")])
def test_quantized_experts_equal_the_backend_s_own_linears(
    cpu: CpuBackend, fill: Fill, read: Read, n_tokens: int, kind: str, activation: str
) -> None:
    router, experts = mixture(cpu, kind)  # type: ignore[arg-type]
    start = randn(n_tokens, WIDTH, seed=1)
    h = fill(cpu.empty((n_tokens, WIDTH)), start)
    step = cpu.step(n_tokens)
    step.set([0] * n_tokens, [Span(0, 0, n_tokens, 0)], [])
    norm = Norm(cpu.vector(host(randn(WIDTH, seed=2))), EPS)
    scores = cpu.empty((n_tokens, N_EXPERTS))
    cpu.norm_linear(step, h, norm, [router], scores)
    probabilities = torch.softmax(read(scores), dim=-1)
    best = torch.topk(probabilities, TOP_K).indices
    want = start.clone()
    for number, expert in enumerate(experts):
        inner = cpu.empty((n_tokens, INNER))
        out = fill(cpu.empty((n_tokens, WIDTH)), torch.zeros(n_tokens, WIDTH))
        cpu.norm_gate_up(step, h, norm, expert.gate, expert.up, activation, inner)
        cpu.linear_add(step, inner, expert.down, None, out)
        chosen = (best == number).any(-1, keepdim=True)
        want += read(out) * torch.where(chosen, probabilities[:, number, None], torch.zeros(()))
    got = added(cpu, fill, read, kind, n_tokens, normalize=False, activation=activation)
    # Only the softmax may differ by roundings: linears have the same bits at every width.
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("kind", ["f32", "int4", "int8", "mixed"])
def test_the_number_of_threads_changes_no_bit(isa: str, fill: Fill, read: Read, kind: str) -> None:
    one, two, three = (
        added(CpuBackend(n, isa=isa, huge_pages=False), fill, read, kind, 40, normalize=True)
        for n in (1, 2, 3)
    )
    assert torch.equal(one, two)
    assert torch.equal(one, three)


def test_equal_scores_choose_the_lowest_experts(cpu: CpuBackend, fill: Fill, read: Read) -> None:
    _, experts = mixture(cpu, "f32")  # type: ignore[arg-type]
    norm = Norm(cpu.vector(host(torch.ones(WIDTH))), EPS)
    step = cpu.step(4)
    step.set([0] * 4, [Span(0, 0, 4, 0)], [])
    results = []
    for some in (experts, experts[:TOP_K]):
        h = fill(cpu.empty((4, WIDTH)), randn(4, WIDTH, seed=1))
        few = Linear(cpu.weight(Dense(host(torch.zeros(len(some), WIDTH)))))
        cpu.moe_add(step, h, norm, few, some, TOP_K, True, "silu")
        results.append(read(h))
    assert torch.equal(*results)
