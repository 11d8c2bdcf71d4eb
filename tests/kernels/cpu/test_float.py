"""Products with dense and table weights: one sum in column order, whatever the instruction set."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import Dense, Form, Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import Linear, Span
from llmrun.kernels.reference.backend import TorchBackend

Fill = Callable[[CpuArray, torch.Tensor], CpuArray]
Read = Callable[[CpuArray], torch.Tensor]
TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32}
MOST_TOKENS = 31


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def host(values: torch.Tensor, dtype: DType) -> HostArray:
    raw = values.contiguous().view(torch.uint8).flatten().numpy().tobytes()
    return HostArray(dtype, tuple(values.shape), memoryview(bytearray(raw)))


def dense(n: int, k: int, dtype: DType) -> Dense:
    return Dense(host(randn(n, k, seed=1).to(TORCH[dtype]), dtype))


def table(n: int, k: int, group: int, dtype: DType) -> Lut16:
    codes = torch.randint(256, (n, k // 2), generator=torch.Generator().manual_seed(2))
    return Lut16(
        group,
        host(codes.to(torch.uint8), DType.U8),
        host(randn(16, seed=3), DType.F32),
        host(randn(n, k // group, seed=4).to(TORCH[dtype]), dtype),
        (n, k),
    )


# Odd columns end within eight, many columns need more than one block; rows end within a panel.
FORMS: dict[str, Form] = {
    "f32": dense(83, 333, DType.F32),
    "f16": dense(131, 77, DType.F16),
    "bf16": dense(16, 601, DType.BF16),
    "lut4_32": table(70, 416, 32, DType.F16),
    "lut4_64": table(150, 64, 64, DType.BF16),
    "lut4_128": table(5, 640, 128, DType.F32),
}


def product(
    backend: CpuBackend, form: Form, x: torch.Tensor, fill: Fill, read: Read
) -> torch.Tensor:
    tokens, n = len(x), form.shape[0]
    step, h = backend.step(tokens), fill(backend.empty((tokens, n)), torch.zeros(tokens, n))
    step.set([0] * tokens, [Span(0, 0, tokens, 0)], [])
    held = fill(backend.empty(tuple(x.shape)), x)
    backend.linear_add(step, held, Linear(backend.weight(form)), None, h)
    return read(h)


@pytest.mark.parametrize("name", FORMS)
def test_every_instruction_set_and_width_has_the_same_bits(
    isas: list[str], fill: Fill, read: Read, name: str
) -> None:
    form = FORMS[name]
    x = randn(MOST_TOKENS, form.shape[1], seed=5)
    first = None
    for isa in isas:
        backend = CpuBackend(2, isa=isa, huge_pages=False)
        for tokens in (1, 2, 3, 4, 6, 7, 13, MOST_TOKENS):
            got = product(backend, form, x[:tokens], fill, read)
            first = got if first is None else first
            rows = min(len(first), tokens)
            assert torch.equal(got[:rows], first[:rows]), (isa, tokens)
            first = got if len(got) > len(first) else first


@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_the_reference(
    cpu: CpuBackend, fill: Fill, read: Read, name: str
) -> None:
    form = FORMS[name]
    x = randn(MOST_TOKENS, form.shape[1], seed=6)
    plain = TorchBackend("cpu", 1)
    want = torch.empty(MOST_TOKENS, form.shape[0])
    plain.weight(form).multiply(x, want)
    got = product(cpu, form, x, fill, read)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_columns_are_added_in_order(cpu: CpuBackend, fill: Fill, read: Read) -> None:
    # 1 is lost beside 2^24 unless the large ones cancel first, which only another order would do;
    # the fused product keeps what a rounded one would lose.
    weight = torch.tensor([[2.0**24, 1.0, -(2.0**24), -1.0, 1.0 + 2.0**-23]])
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0 - 2.0**-23]])
    got = product(cpu, Dense(host(weight, DType.F32)), x, fill, read)
    assert float(got[0, 0]) == -(2.0**-46)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32], ids=["bf16", "f32"])
def test_scales_far_beyond_f16_keep_their_value(
    cpu: CpuBackend, fill: Fill, read: Read, dtype: DType
) -> None:
    # MXFP4: powers of two as scales, of which f16 has a few dozen.
    exponents = torch.arange(-126, 33)
    scales = (2.0**exponents).unsqueeze(1).repeat(1, 2)
    form = table(len(exponents), 64, 32, DType.F32)
    form = replace(form, scales=host(scales.to(TORCH[dtype]), dtype))
    x = randn(MOST_TOKENS, 64, seed=6)
    want = torch.empty(MOST_TOKENS, len(exponents))
    TorchBackend("cpu", 1).weight(form).multiply(x, want)
    for tokens in (1, MOST_TOKENS):
        got = product(cpu, form, x[:tokens], fill, read)
        # Relative to each row; the smallest weights are subnormal and count as 0.
        unit = (2.0**exponents) * 64
        assert ((got - want[:tokens]).abs() <= 1e-5 * unit + 2.0**-120).all()
