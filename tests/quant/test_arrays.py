"""Host arrays seen through numpy."""

import pytest
import torch

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.arrays import first_overflow, widened


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_widened_scales_are_exact(dtype: torch.dtype) -> None:
    scales = torch.tensor([[1.5, -2.0e-7], [65504.0, -0.0]]).to(dtype)
    names = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}
    raw = memoryview(bytearray(scales.view(torch.uint8).numpy().tobytes()))
    found = widened(HostArray(names[dtype], (2, 2), raw))
    assert found.dtype is DType.F32
    bits = torch.frombuffer(found.data, dtype=torch.int32).view(2, 2)
    assert torch.equal(bits, scales.float().view(torch.int32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e36])
def test_the_first_scale_that_overflows_is_found(value: float) -> None:
    scales = torch.tensor([[1.0, 7e35], [value, value]])
    raw = memoryview(bytearray(scales.view(torch.uint8).numpy().tobytes()))
    assert first_overflow(HostArray(DType.F32, (1, 2), raw[:8]), 448) is None
    assert first_overflow(HostArray(DType.F32, (2, 2), raw), 448) == 2
