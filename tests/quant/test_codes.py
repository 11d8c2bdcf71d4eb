"""Codes of any width against the reference library's own packing."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from llmrun.quant.codes import container_bits, offset, unpacked


def _signed(bits: int, n: int, k: int) -> torch.Tensor:
    half = 2 ** (bits - 1)
    generator = torch.Generator().manual_seed(bits)
    signed = torch.randint(-half, half, (n, k), generator=generator)
    signed[0, :2] = torch.tensor([-half, half - 1])
    return signed.to(torch.int8)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (7, 96)])
def test_widened_codes_keep_their_value(bits: int, n: int, k: int, shift: bool) -> None:
    signed = _signed(bits, n, k)
    stream = memoryview(pack_to_int32(signed, bits).numpy()).cast("B")
    host = unpacked(stream, bits, (n, k), shift=shift)
    container = container_bits(bits)
    assert container == (4 if bits <= 4 else 8)
    assert host.shape == (n, k * container // 8)
    codes = torch.frombuffer(host.data, dtype=torch.uint8).view(host.shape)
    if container == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    middle = 2 ** (container - 1) if shift else 2 ** (bits - 1)
    assert torch.equal(codes.int() - middle, signed.int())


def test_signed_bytes_become_offset_codes() -> None:
    signed = _signed(8, 3, 128)
    host = offset(memoryview(signed.numpy()).cast("B"), (3, 128))
    codes = torch.frombuffer(host.data, dtype=torch.uint8).view(3, 128)
    assert torch.equal(codes.int() - 128, signed.int())
