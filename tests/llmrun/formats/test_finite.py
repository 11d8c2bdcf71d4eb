"""NaN and infinity are found at their index, whatever stands around them."""

import numpy as np
import pytest
import torch

from llmrun.formats.finite import first_nonfinite
from llmrun.kernels.host import DType, HostArray

TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32}
TORCH[DType.F64] = torch.float64


def _array(values: torch.Tensor, dtype: DType) -> HostArray:
    raw = values.to(TORCH[dtype]).view(torch.uint8).numpy().tobytes()
    return HostArray(dtype, (values.numel(),), memoryview(bytearray(raw)))


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_index_of_the_first(dtype: DType, bad: float) -> None:
    largest = torch.finfo(TORCH[dtype]).max
    values = torch.randn(1000, dtype=torch.float64)
    values[::7], values[1::7] = largest, -largest
    values[2::7] = torch.finfo(TORCH[dtype]).tiny
    assert first_nonfinite(_array(values, dtype)) is None
    values[[613, 800]] = bad
    assert first_nonfinite(_array(values, dtype)) == 613


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_every_16_bit_pattern(dtype: DType) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    finite = torch.isfinite(torch.from_numpy(patterns).view(TORCH[dtype])).tolist()
    for pattern in range(0, 2**16, 37):
        raw = bytearray(patterns[pattern : pattern + 1].tobytes())
        found = first_nonfinite(HostArray(dtype, (1,), memoryview(raw)))
        assert (found is None) == finite[pattern]


def test_behind_the_first_chunk() -> None:
    raw = bytearray(20 << 20)
    raw[4 * 4_999_999 : 4 * 5_000_000] = b"\0\0\xc0\x7f"
    array = HostArray(DType.F32, (len(raw) // 4,), memoryview(raw))
    assert first_nonfinite(array) == 4_999_999


def test_integers_are_finite() -> None:
    assert first_nonfinite(HostArray(DType.U8, (2,), memoryview(bytearray(b"\xff\xff")))) is None
