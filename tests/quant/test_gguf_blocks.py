"""Blocks become storage forms without changing a weight, for any bytes."""

import gguf
import numpy as np
import pytest

from llmrun.kernels.forms import GroupInt
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.gguf_blocks import BLOCK_BYTES, unblock


def _random_blocks(kind: str, n: int, k: int) -> bytearray:
    """Return random codes with finite random scales, negative and subnormal ones among them."""
    rng = np.random.default_rng(n * k)
    blocks = rng.integers(0, 256, (n * k // 32, BLOCK_BYTES[kind]), np.uint8)
    heads = 2 if kind == "Q4_1" else 1
    scales = rng.standard_normal((len(blocks), heads)).astype(np.float16)
    scales[::5] = np.float16(6e-8)
    scales[1::5] = -np.abs(scales[1::5])
    scales[2::5] = np.float16(65504)
    blocks[:, : 2 * heads] = scales.view(np.uint8)
    return bytearray(blocks.tobytes())


def _weights(form: GroupInt) -> np.ndarray:
    """Return the weights by the storage form's own formula, in float64."""
    codes = np.frombuffer(form.codes.data, np.uint8).reshape(form.codes.shape)
    if form.bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(form.shape)
    u = codes.reshape(-1, form.group).astype(np.float64)
    s = np.frombuffer(form.scales.data, np.float16).astype(np.float64)[:, None]
    if form.mins is None:
        return (s * (u - 2 ** (form.bits - 1))).reshape(form.shape)
    m = np.frombuffer(form.mins.data, np.float16).astype(np.float64)[:, None]
    return (s * u + m).reshape(form.shape)


@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (7, 96), (65, 576), (300, 4096)])
@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_equal_to_the_reference(kind: str, shape: tuple[int, int]) -> None:
    raw = _random_blocks(kind, *shape)
    form = unblock(kind, HostArray(DType.U8, (len(raw),), memoryview(raw)), shape)
    type_ = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(np.frombuffer(raw, np.uint8).reshape(shape[0], -1), type_)
    assert np.array_equal(_weights(form).astype(np.float32), expected)
    assert (form.group, form.mins is not None) == (32, kind == "Q4_1")


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_scales_keep_their_bits_even_if_not_finite(kind: str) -> None:
    size = BLOCK_BYTES[kind]
    raw = bytearray(64 * size)
    for block in range(64):
        raw[block * size : block * size + 2] = (0x7C00 + 37 * block).to_bytes(2, "little")
    form = unblock(kind, HostArray(DType.U8, (len(raw),), memoryview(raw)), (2, 1024))
    expected = [0x7C00 + 37 * block for block in range(64)]
    assert np.frombuffer(form.scales.data, np.uint16).tolist() == expected


def test_wrong_sizes_are_our_fault() -> None:
    raw = HostArray(DType.U8, (18,), memoryview(bytearray(18)))
    with pytest.raises(ValueError, match="Q4_0"):
        unblock("Q4_0", raw, (1, 64))
    with pytest.raises(ValueError, match="Q4_0"):
        unblock("Q4_0", raw, (2, 16))
