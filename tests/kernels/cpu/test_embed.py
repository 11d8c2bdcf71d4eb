"""Rows of the embedding table: every bit as the reference has it."""

import struct
from collections.abc import Callable

import pytest
import torch

from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import ROW, Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.backend import TorchBackend

TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32}
N, K = 83, 128


def floats(dtype: DType, *shape: int, seed: int) -> HostArray:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TORCH[dtype])
    return HostArray(
        dtype, shape, memoryview(bytearray(values.view(torch.uint8).numpy().tobytes()))
    )


def codes(*shape: int) -> HostArray:
    values = torch.randint(256, shape, generator=torch.Generator().manual_seed(3))
    return HostArray(
        DType.U8, shape, memoryview(bytearray(values.to(torch.uint8).numpy().tobytes()))
    )


def integers(bits: int, group: int, mins: bool | str, dtype: DType) -> GroupInt:
    groups = K // (group or K)
    minima = floats(dtype, N, groups, seed=2) if mins else None
    if mins == "zeros":
        minima = codes(N, groups)
    return GroupInt(
        bits,
        group,
        codes(N, K * bits // 8),
        floats(dtype, N, groups, seed=1),
        minima,
        (N, K),
    )


E2M1 = HostArray(
    DType.F32,
    (16,),
    memoryview(bytearray(struct.pack("<16f", 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5,
                                     -2, -3, -4, -6))),
)  # fmt: skip
FORMS: dict[str, Form] = {
    "f32": Dense(floats(DType.F32, N, K, seed=4)),
    "f16": Dense(floats(DType.F16, N, K, seed=4)),
    "bf16": Dense(floats(DType.BF16, N, K, seed=4)),
    "int4": integers(4, 32, False, DType.F16),
    "int4_mins": integers(4, 64, True, DType.BF16),
    "int4_row": integers(4, ROW, False, DType.F32),
    "int8": integers(8, 128, False, DType.BF16),
    "int8_16": integers(8, 16, False, DType.F32),
    "int8_mins": integers(8, 32, True, DType.F16),
    "int4_zeros": integers(4, 32, "zeros", DType.F16),
    "int8_zeros": integers(8, 128, "zeros", DType.BF16),
    "int8_row": integers(8, ROW, False, DType.F32),
    "lut4": Lut16(64, codes(N, K // 2), floats(DType.F32, 16, seed=6),
                  floats(DType.F16, N, K // 64, seed=7), (N, K)),
    "e2m1": Lut16(32, codes(N, K // 2), E2M1, floats(DType.BF16, N, K // 32, seed=8), (N, K)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("scale", [1.0, 11.3])
def test_rows_have_the_bits_of_the_reference(
    cpu: CpuBackend, read: Callable[[CpuArray], torch.Tensor], name: str, scale: float
) -> None:
    ids = [0, 82, 15, 16, 17, 80, 3, 3, 64]
    step, h = cpu.step(len(ids)), cpu.empty((len(ids), K))
    step.set(ids, [Span(0, 0, len(ids), 0)], [])
    cpu.embed(step, cpu.weight(FORMS[name]), scale, h)

    plain = TorchBackend("cpu", 1)
    other, want = plain.step(len(ids)), torch.empty(len(ids), K)
    other.set(ids, [Span(0, 0, len(ids), 0)], [])
    plain.embed(other, plain.weight(FORMS[name]), scale, want)
    assert torch.equal(read(h), want)


def test_sub_normal_and_infinite_halves(
    cpu: CpuBackend, read: Callable[[CpuArray], torch.Tensor]
) -> None:
    # Sub-normal halves are normal floats: flushing them would be a loss.
    bits = torch.arange(0x7C01, dtype=torch.int32).to(torch.int16)
    values = torch.cat([bits, bits | -0x8000]).view(torch.float16)
    raw = memoryview(bytearray(values.view(torch.uint8).numpy().tobytes()))
    step, h = cpu.step(1), cpu.empty((1, len(values)))
    step.set([0], [Span(0, 0, 1, 0)], [])
    cpu.embed(step, cpu.weight(Dense(HostArray(DType.F16, (1, len(values)), raw))), 1.0, h)
    assert torch.equal(read(h)[0], values.float())
