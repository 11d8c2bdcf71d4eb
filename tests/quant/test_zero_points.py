"""Packed zero points against the reference library's own unpacking."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.zero_points import minima, signed_minima


def _host(tensor: torch.Tensor, dtype: DType) -> HostArray:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return HostArray(dtype, tuple(tensor.shape), memoryview(bytearray(raw)))


@pytest.mark.parametrize("rows", [1, 7, 8, 33])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16, torch.float32])
def test_minimum_is_minus_scale_times_zero_point(rows: int, bits: int, scale: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    half = 2 ** (bits - 1)
    zeros = torch.randint(-half, half, (rows, 5), generator=generator).to(torch.int8)
    scales = torch.randn((rows, 5), generator=generator).to(scale)
    names = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}
    packed = pack_to_int32(zeros, bits, packed_dim=0)
    found = minima(_host(packed, DType.I32), _host(scales, names[scale]), bits)
    expected = -scales.float() * (zeros.float() + half)
    assert found.dtype is DType.F32
    assert torch.equal(torch.frombuffer(found.data, dtype=torch.float32).view(rows, 5), expected)


def test_zero_points_of_signed_codes_count_from_128() -> None:
    zeros = torch.tensor([[-128, 0], [127, 5]], dtype=torch.int8)
    scales = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    found = signed_minima(_host(zeros, DType.I8), _host(scales, DType.F32))
    expected = -scales * (zeros.float() + 128)
    assert torch.equal(torch.frombuffer(found.data, dtype=torch.float32).view(2, 2), expected)
