"""Groups of other tools spread over ours, and their arithmetic against float64."""

from types import SimpleNamespace

import numpy as np
import pytest

from llmrun.kernels.forms import ROW
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.group_scales import (
    LUT_GROUPS,
    all_equal,
    minima,
    reordered,
    scales_and_minima,
    shared_group,
    shift_of,
    spread,
)


@pytest.mark.parametrize(
    ("stored", "k", "group"),
    [
        (128, 4096, 128),
        (64, 4096, 64),
        (16, 4096, 16),
        (48, 96, 16),
        (256, 4096, 128),
        (1024, 576, 64),
        (128, 160, 32),
        (128, 128, 128),
        (ROW, 4096, ROW),
        (ROW, 100, ROW),
        (100, 100, ROW),
        (200, 100, ROW),
        (8, 4096, None),
        (100, 200, None),
        (128, 136, None),
    ],
)
def test_the_widest_group_without_loss(stored: int, k: int, group: int | None) -> None:
    assert shared_group(stored, k) == group


def test_tables_have_no_group_of_16() -> None:
    assert shared_group(16, 4096, LUT_GROUPS) is None


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
def test_spread_repeats_each_value(dtype: DType, oracle: SimpleNamespace) -> None:
    values = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    stored = oracle.make(values, dtype)
    for size, group, k in ((128, 128, 256), (ROW, ROW, 96)):
        same = oracle.make(values[:, :1] if size == ROW else values, dtype)
        assert spread(same, size, group, k) is same
    found = spread(stored, 128, 32, 160)
    assert found.shape == (3, 5)
    expected = oracle.read(stored)[:, [0, 0, 0, 0, 1]]
    assert np.array_equal(oracle.read(found), expected)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
def test_minima_are_exact_in_fp32(dtype: DType, oracle: SimpleNamespace) -> None:
    rng = np.random.default_rng(1)
    scales = oracle.make(rng.standard_normal((7, 5)).astype(np.float32), dtype)
    zeros = oracle.make(rng.integers(0, 256, (7, 5)), DType.U8)
    expected = -oracle.read(scales) * oracle.read(zeros)
    found = minima(scales, zeros)
    assert found.dtype is DType.F32
    assert np.array_equal(oracle.read(found), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("bits", [4, 8])
def test_reordered_weights_are_exact(bits: int, dtype: DType, oracle: SimpleNamespace) -> None:
    rng = np.random.default_rng(bits)
    n, k, groups = 1100, 1026, 9  # more rows than are taken at a time
    codes = rng.integers(0, 2**bits, (n, k))
    packed = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    scales = oracle.make(rng.standard_normal((n, groups)).astype(np.float32), dtype)
    zeros = rng.integers(0, 2**bits, (n, groups))
    order = rng.integers(0, groups, k).astype(np.int32)
    found = reordered(
        oracle.make(packed, DType.U8),
        bits,
        scales,
        oracle.make(zeros, DType.U8),
        HostArray(DType.I32, (k,), memoryview(bytearray(order.tobytes()))),
    )
    expected = oracle.read(scales)[:, order] * (codes - zeros[:, order])
    assert np.array_equal(oracle.read(found), expected)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
def test_zero_points_stay_beside_scales_of_16_bits(dtype: DType, oracle: SimpleNamespace) -> None:
    rng = np.random.default_rng(2)
    stored = oracle.make(rng.standard_normal((3, 2)).astype(np.float32), dtype)
    zeros = oracle.make(rng.integers(0, 16, (3, 2)), DType.U8)
    scales, mins = scales_and_minima(stored, None, 128, 128, 256)
    assert (scales.dtype, mins) == (dtype, None)
    scales, mins = scales_and_minima(stored, zeros, 256, 128, 512)
    assert mins is not None
    assert scales.dtype is dtype
    expected = np.repeat(oracle.read(stored), 2, axis=1)
    assert np.array_equal(oracle.read(scales), expected)
    owners = np.repeat(oracle.read(zeros), 2, axis=1)
    if dtype is DType.F32:
        assert mins.dtype is DType.F32
        assert np.array_equal(oracle.read(mins), (-expected * owners).astype(np.float32))
    else:
        assert mins.dtype is DType.U8
        assert np.array_equal(oracle.read(mins), owners)
    assert shift_of(dtype.name) == ("zero" if mins.dtype is DType.U8 else "min")


def test_all_equal() -> None:
    array = HostArray(DType.U8, (2, 2), memoryview(bytearray(b"\x08\x08\x08\x08")))
    assert all_equal(array, 8)
    array.data[3] = 7
    assert not all_equal(array, 8)
