"""The native unpacking by itself; its values are tested in tests/quant/test_gguf_blocks.py."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from llmrun.errors import UnavailableError
from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.gguf import unpack
from llmrun.kernels.cpu.library import library
from llmrun.kernels.host import DType, HostArray, empty
from llmrun.kernels.ops import Linear, Span
from llmrun.quant.gguf_blocks import BLOCK_TYPES, unblock


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    try:
        library()
    except UnavailableError as error:
        pytest.skip(f"no native library: {error.what}")


Q4_K, Q6_K, Q8_0 = 12, 14, 8
HEADS = {"Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()}
"""Where the f16 numbers of a block are."""


def _part(array: HostArray, start: int, stop: int) -> HostArray:
    """Rows start..stop of a 2-D array."""
    row = array.nbytes // array.shape[0]
    data = array.data[start * row : stop * row]
    return HostArray(array.dtype, (stop - start, array.shape[1]), data)


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32])
def test_rows_may_be_unpacked_one_by_one(dtype: DType) -> None:
    raw = bytearray(np.random.default_rng(0).integers(0, 60, 5 * 3 * 144, np.uint8).tobytes())
    blocks = HostArray(DType.U8, (5, 3 * 144), memoryview(raw))
    whole = [empty(DType.U8, (5, 384)), empty(dtype, (5, 24)), empty(dtype, (5, 24))]
    parts = [empty(array.dtype, array.shape) for array in whole]
    assert unpack(Q4_K, blocks, 15, *whole) == 0
    for row in (4, 0, 2, 1, 3):
        codes, scales, mins = (_part(array, row, row + 1) for array in parts)
        assert unpack(Q4_K, _part(blocks, row, row + 1), 3, codes, scales, mins) == 0
    assert [bytes(a.data) for a in parts] == [bytes(a.data) for a in whole]
    assert any(whole[0].data)


def test_nothing_beyond_the_arrays_is_written() -> None:
    blocks = HostArray(DType.U8, (2 * 210,), memoryview(bytearray(b"\x11" * 420)))
    codes, scales = empty(DType.U8, (3, 256)), empty(DType.F16, (3, 16))
    for array in (codes, scales):
        array.data[:] = b"\xa5" * array.nbytes
    assert unpack(Q6_K, blocks, 2, codes, scales, None) == 0
    assert bytes(codes.data[512:]) == b"\xa5" * 256
    assert bytes(scales.data[64:]) == b"\xa5" * 32
    assert 0xA5 not in bytes(codes.data[:512])


def test_bad_numbers_are_counted() -> None:
    blocks = HostArray(DType.U8, (3 * 34,), memoryview(bytearray(b"\xff" * 102)))
    codes, scales = empty(DType.U8, (3, 32)), empty(DType.F16, (3, 1))
    assert unpack(Q8_0, blocks, 3, codes, scales, None) == 3


def test_an_unknown_type_is_our_fault() -> None:
    codes, scales = empty(DType.U8, (1, 256)), empty(DType.F16, (1, 16))
    with pytest.raises(ValueError, match="GGUF type 16"):
        unpack(16, codes, 1, codes, scales, None)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_products_are_those_of_the_weights(
    kind: str,
    cpu: CpuBackend,
    fill: Callable[[CpuArray, torch.Tensor], CpuArray],
    read: Callable[[CpuArray], torch.Tensor],
) -> None:
    stored, (n, k) = BLOCK_TYPES[kind], (37, 512)
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (n * k // stored.weights, stored.nbytes), np.uint8)
    for at in HEADS[kind]:
        small = (0.01 * rng.standard_normal((len(blocks), 1))).astype(np.float16)
        blocks[:, at : at + 2] = small.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, len(blocks))
    raw = HostArray(DType.U8, (blocks.size,), memoryview(bytearray(blocks.tobytes())))
    weight = cpu.weight(unblock(kind, raw, (n, k), ValueError))
    type_ = gguf.GGMLQuantizationType[kind]
    true = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(n, -1), type_)).double()
    for tokens in (1, 20):
        x = torch.from_numpy(rng.standard_normal((tokens, k), np.float32))
        step = cpu.step(32)
        step.set([0] * tokens, [Span(0, 0, tokens, 0)], [])
        y = fill(cpu.empty((32, n)), torch.zeros(tokens, n))
        cpu.linear_add(step, fill(cpu.empty((32, k)), x), Linear(weight), None, y)  # type: ignore[arg-type]
        expected = x.double() @ true.T
        error = (read(y)[:tokens] - expected).norm() / expected.norm()
        assert error < (1e-3 if stored.group == 16 else 1e-2)  # codes of activations: 16, 8 bits


def test_subnormal_numbers_survive_a_thread_that_flushes_them() -> None:
    blocks = HostArray(DType.U8, (210,), memoryview(bytearray(b"\x01" * 208 + b"\x01\x00")))
    codes, scales = empty(DType.U8, (1, 256)), empty(DType.F16, (1, 16))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        assert unpack(Q6_K, blocks, 1, codes, scales, None) == 0
    finally:
        torch.set_flush_denormal(False)
    assert bytes(scales.data) == b"\x01\x00" * 16
