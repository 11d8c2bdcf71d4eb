"""Packed zero points against the reference library's own unpacking."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.zero_points import packed_zeros, unpacked_zeros, unsigned_zeros


def _host(tensor: torch.Tensor, dtype: DType) -> HostArray:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return HostArray(dtype, tuple(tensor.shape), memoryview(bytearray(raw)))


@pytest.mark.parametrize("rows", [1, 7, 8, 33])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_zero_points_are_what_the_library_packed(rows: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    half = 2 ** (bits - 1)
    zeros = torch.randint(-half, half, (rows, 5), generator=generator).to(torch.int8)
    packed = pack_to_int32(zeros, bits, packed_dim=0)
    found = unpacked_zeros(_host(packed, DType.I32), (rows, 5), bits)
    assert found.dtype is DType.U8
    unsigned = torch.frombuffer(found.data, dtype=torch.uint8).view(rows, 5)
    assert torch.equal(unsigned.int(), zeros.int() + half)
    if bits in (4, 8):
        again = packed_zeros(found, bits)
        assert again.shape == tuple(packed.shape)
        assert bytes(again.data) == packed.numpy().tobytes()


def test_zero_points_of_signed_codes_count_from_128() -> None:
    zeros = torch.tensor([[-128, 0], [127, 5]], dtype=torch.int8)
    found = unsigned_zeros(_host(zeros, DType.I8))
    assert found.dtype is DType.U8
    assert list(found.data) == [0, 128, 255, 133]
