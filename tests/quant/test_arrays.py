"""Host arrays seen through numpy."""

import pytest
import torch

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.arrays import first_overflow


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e36])
def test_the_first_scale_that_overflows_is_found(value: float) -> None:
    scales = torch.tensor([[1.0, 7e35], [value, value]])
    raw = memoryview(bytearray(scales.view(torch.uint8).numpy().tobytes()))
    assert first_overflow(HostArray(DType.F32, (1, 2), raw[:8]), 448) is None
    assert first_overflow(HostArray(DType.F32, (2, 2), raw), 448) == 2
