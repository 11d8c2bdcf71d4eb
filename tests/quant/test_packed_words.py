"""Packed words against packing written out code by code."""

import numpy as np
import pytest

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.packed_words import (
    AWQ_ORDER,
    IN_ORDER,
    codes_along_inputs,
    codes_along_outputs,
    transposed,
    zero_points,
)


def _host(values: np.ndarray, dtype: DType) -> HostArray:
    return HostArray(dtype, values.shape, memoryview(bytearray(values.tobytes())))


def _bytes(codes: np.ndarray, bits: int) -> bytes:
    """Codes [N, K] as GroupInt stores them."""
    if bits == 8:
        return codes.astype(np.uint8).tobytes()
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).tobytes()


def _packed(codes: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Pack along the last axis: field p of a word is its neighbour ``order[p]``."""
    words = np.zeros((codes.shape[0], codes.shape[1] * bits // 32), np.uint32)
    for position, place in enumerate(order):
        words |= codes[:, place :: len(order)].astype(np.uint32) << np.uint32(bits * position)
    return words


@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (65, 64), (130, 129)])
@pytest.mark.parametrize("dtype", [DType.U8, DType.F16, DType.BF16, DType.I32])
def test_transposed(shape: tuple[int, int], dtype: DType) -> None:
    kind = {8: np.uint8, 16: np.uint16, 32: np.uint32}[dtype.bits]
    values = np.random.default_rng(0).integers(0, 2**dtype.bits, shape).astype(kind)
    found = transposed(_host(values, dtype))
    assert (found.dtype, found.shape) == (dtype, shape[::-1])
    assert bytes(found.data) == np.ascontiguousarray(values.T).tobytes()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (70, 96), (129, 4160)])
def test_codes_along_inputs(n: int, k: int, bits: int) -> None:
    codes = np.random.default_rng(n).integers(0, 2**bits, (n, k))
    order = tuple(range(32 // bits))
    words = _host(np.ascontiguousarray(_packed(codes, bits, order).T), DType.I32)
    for symmetric in (False, True):
        found = codes_along_inputs(words, bits, symmetric=symmetric)
        moved = codes + 6 * (bits == 2 and symmetric)
        assert found.shape == (n, k * max(4, bits) // 8)
        assert bytes(found.data) == _bytes(moved, bits)


@pytest.mark.parametrize(("n", "k"), [(8, 8), (24, 104), (2_064, 136), (8, 40_000)])
def test_codes_along_outputs(n: int, k: int) -> None:
    codes = np.random.default_rng(n).integers(0, 16, (n, k))
    words = _host(_packed(np.ascontiguousarray(codes.T), 4, AWQ_ORDER), DType.I32)
    found = codes_along_outputs(words)
    assert found.shape == (n, k // 2)
    assert bytes(found.data) == _bytes(codes, 4)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points(bits: int) -> None:
    order = IN_ORDER if bits == 4 else tuple(range(32 // bits))
    zeros = np.random.default_rng(bits).integers(0, 2**bits, (5, 48))
    zeros[:, ::5] = 0
    wanted = np.ascontiguousarray(zeros.T).astype(np.uint8).tobytes()
    words = _packed(zeros, bits, order)
    found = zero_points(_host(words, DType.I32), bits)
    assert (found.dtype, found.shape) == (DType.U8, (48, 5))
    assert bytes(found.data) == wanted
    fields = _packed((zeros - 1) % 2**bits, bits, order)
    assert bytes(zero_points(_host(fields, DType.I32), bits, less_one="field").data) == wanted
    ones = _packed(np.ones_like(zeros), bits, order)
    assert bytes(zero_points(_host(words - ones, DType.I32), bits, less_one="word").data) == wanted


def test_zero_points_in_awq_order() -> None:
    zeros = np.random.default_rng(1).integers(0, 16, (3, 40))
    words = _host(_packed(zeros, 4, AWQ_ORDER), DType.I32)
    found = np.frombuffer(zero_points(words, 4, AWQ_ORDER).data, np.uint8).reshape(40, 3)
    assert np.array_equal(found, zeros.T)
