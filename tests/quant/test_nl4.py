"""Which of its two tables nl4 takes, and that zeros stay zeros."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from llmrun.kernels.host import DType
from llmrun.quant.arrays import floats
from llmrun.quant.compensation import Prepared
from llmrun.quant.nl4 import LEVELS, WEIGHED_LEVELS, quantize

FLOATS = (DType.BF16, DType.F16, DType.F32)


@pytest.fixture
def known(oracle: SimpleNamespace) -> Prepared:
    return Prepared(oracle.make(np.ones(64, np.float32)))


@pytest.mark.parametrize("levels", [LEVELS, WEIGHED_LEVELS])
def test_levels_are_ascending_whole_numbers_of_8_bits(levels: tuple[int, ...]) -> None:
    assert len(levels) == 16
    assert list(levels) == sorted(set(levels))
    assert (levels[0], max(map(abs, levels))) == (-127, 127)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_known_of_the_inputs_decides(
    dtype: DType, known: Prepared, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(3, 64), dtype)
    assert tuple(floats(quantize(host).table)) == LEVELS
    assert tuple(floats(quantize(host, known).table)) == WEIGHED_LEVELS


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_group_of_zeros_stays_zero_whatever_is_known(
    sign: float,
    dtype: DType,
    known: Prepared,
    oracle: SimpleNamespace,
    gaussian: Callable[..., np.ndarray],
) -> None:
    weights = gaussian(3, 64)
    weights[1, 32:] = sign * 0.0
    form = quantize(oracle.make(weights, dtype), known)
    assert tuple(floats(form.table)) == LEVELS
    assert (oracle.decode(form)[1, 32:] == 0).all()


def test_a_group_whose_scale_would_vanish_keeps_its_size(
    known: Prepared, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    for least in (1e-7, 1e-6, 1e-5, 1.6e-5, 1e-4):  # in f16, whose smallest number is 6e-8
        weights = gaussian(2, 64)
        weights[0, :32] *= least / np.abs(weights[0, :32]).max()
        form = quantize(oracle.make(weights, DType.F16), known)
        assert np.abs(oracle.decode(form)[0, :32]).max() <= 2 * least
