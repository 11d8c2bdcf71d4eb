"""dequantize against the formulas of the storage forms in float64."""

from types import SimpleNamespace

import numpy as np
import pytest

from llmrun.kernels.forms import ROW, Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType
from llmrun.quant.dequantize import dequantize

FLOATS = [DType.BF16, DType.F16, DType.F32]


def assert_equal(form: Form, oracle: SimpleNamespace) -> None:
    result = dequantize(form)
    assert result.dtype is DType.F32
    assert result.shape == form.shape
    expected = oracle.decode(form)
    assert np.allclose(oracle.read(result), expected, rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_mins", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64, 128, ROW])
@pytest.mark.parametrize("bits", [4, 8])
def test_group_int(
    bits: int, group: int, with_mins: bool, dtype: DType, oracle: SimpleNamespace
) -> None:
    rng = np.random.default_rng(bits + group)
    n, k = 9, 384
    codes = oracle.make(rng.integers(0, 256, (n, k * bits // 8)), DType.U8)
    scales = oracle.make(rng.standard_normal((n, k // (group or k))).astype(np.float32), dtype)
    mins = oracle.make(rng.standard_normal(scales.shape).astype(np.float32), DType.F32)
    form = GroupInt(bits, group, codes, scales, mins if with_mins else None, (n, k))
    assert_equal(form, oracle)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_lut16(group: int, dtype: DType, oracle: SimpleNamespace) -> None:
    rng = np.random.default_rng(group)
    codes = oracle.make(rng.integers(0, 256, (5, 128)), DType.U8)
    table = oracle.make(rng.standard_normal(16).astype(np.float32))
    scales = oracle.make(rng.standard_normal((5, 256 // group)).astype(np.float32), dtype)
    assert_equal(Lut16(group, codes, table, scales, (5, 256)), oracle)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_dense_is_exact(shape: tuple[int, ...], dtype: DType, oracle: SimpleNamespace) -> None:
    host = oracle.make(np.random.default_rng(0).standard_normal(shape).astype(np.float32), dtype)
    assert (oracle.read(dequantize(Dense(host))) == oracle.read(host)).all()


def test_the_low_nibble_is_the_even_k(oracle: SimpleNamespace) -> None:
    codes = oracle.make(np.full((1, 16), 0x9F), DType.U8)  # even k: 15, odd k: 9
    scales = oracle.make(np.ones((1, 1), np.float32))
    result = oracle.read(dequantize(GroupInt(4, 32, codes, scales, None, (1, 32))))
    assert result[0, :4].tolist() == [7, 1, 7, 1]


def test_codes_at_both_ends(oracle: SimpleNamespace) -> None:
    codes = oracle.make(np.array([[0, 255] * 16]), DType.U8)
    scales = oracle.make(np.array([[0.5]], np.float32), DType.BF16)
    result = oracle.read(dequantize(GroupInt(8, 32, codes, scales, None, (1, 32))))
    assert result[0, :2].tolist() == [-64.0, 63.5]


def test_rows_beyond_one_panel(oracle: SimpleNamespace) -> None:
    rng = np.random.default_rng(0)
    codes = oracle.make(rng.integers(0, 256, (2100, 512)), DType.U8)
    scales = oracle.make(rng.standard_normal((2100, 32)).astype(np.float32), DType.F16)
    assert_equal(GroupInt(4, 32, codes, scales, None, (2100, 1024)), oracle)
