"""int8 against its formula in numpy."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.host import DType
from llmrun.quant.int8 import quantize, quantize_with_torch


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("k", [128, 192, 96])
def test_bytes_equal_the_formula(
    dtype: DType, k: int, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(17, k), dtype)
    form = quantize(host)
    groups = oracle.read(host).astype(np.float32).reshape(-1, form.group)
    absmax = np.abs(groups).max(axis=1, keepdims=True)
    scales = oracle.make(absmax / np.float32(127), dtype)
    assert bytes(form.scales.data) == bytes(scales.data)
    stored = oracle.read(scales).astype(np.float32)
    codes = np.clip(np.rint(groups / stored), -127, 127) + 128
    assert (oracle.levels(form).reshape(codes.shape) == codes).all()


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
def test_error_within_half_a_step(
    dtype: DType, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(64, 512, seed=3), dtype)
    form = quantize(host)
    half = oracle.spread(form.scales, 512) / 2
    error = np.abs(oracle.decode(form) - oracle.read(host))
    assert (error <= half * (1 + 1e-5)).all()


def test_code_minus_128_is_never_made(oracle: SimpleNamespace) -> None:
    values = -np.abs(np.random.default_rng(0).standard_normal((8, 128))).astype(np.float32)
    levels = oracle.levels(quantize(oracle.make(values, DType.BF16)))
    assert levels.min() == 1  # q = -127


def test_half_goes_to_even(oracle: SimpleNamespace) -> None:
    values = np.zeros((1, 128), np.float32)
    values[0, :6] = (127, 0.5, 1.5, 2.5, -0.5, -1.5)  # the scale is exactly 1
    levels = oracle.levels(quantize(oracle.make(values)))[0, :6].astype(int) - 128
    assert levels.tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.skipif(problem() is not None, reason="no native library")
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("k", [128, 192, 96])
def test_the_library_and_torch_give_the_same_bytes(
    dtype: DType, k: int, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    values = gaussian(600, k)
    sizes = np.logspace(-45, 4, 600, dtype=np.float64)[:, None]  # sub-normal scales, and none
    values = (values * sizes).astype(np.float32).clip(-65504, 65504)
    values[::50] = 0
    values[1::50, 1] = -65504
    host = oracle.make(values, dtype)
    ours, theirs = quantize(host), quantize_with_torch(host, quantize(host).group)
    assert bytes(ours.scales.data) == bytes(theirs.scales.data)
    assert bytes(ours.codes.data) == bytes(theirs.codes.data)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_weight_that_is_not_finite_is_named(
    dtype: DType, bad: float, oracle: SimpleNamespace
) -> None:
    values = np.ones((5, 96), np.float32)
    values[3, 70], values[4, 0] = bad, bad
    host = oracle.make(values, dtype)
    for make in (quantize, lambda host: quantize_with_torch(host, 32)):
        with pytest.raises(ModelFileError, match=rf"\[3, 70\] is {bad}"):
            make(host)
