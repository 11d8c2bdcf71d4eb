"""Errors of weights and states against plain float64."""

import math

import numpy as np
import pytest

from llmrun.kernels.forms import Dense
from llmrun.kernels.host import DType, HostArray
from llmrun.quant import deviation
from llmrun.quant.dequantize import dequantize
from llmrun.quant.deviation import StateError, dense, relative_mse
from llmrun.quant.scheme import find


def host(array: np.ndarray) -> HostArray:
    array = np.ascontiguousarray(array, dtype="<f4")
    return HostArray(DType.F32, array.shape, memoryview(array).cast("B"))


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (37, 128)).astype(np.float32)


@pytest.mark.parametrize("panel", [1 << 22, 300])
def test_relative_mse_of_a_quantized_weight(
    weight: np.ndarray, panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deviation, "PANEL", panel)
    form = find("int4").quantize(host(weight))
    undone = np.frombuffer(dequantize(form).data, "<f4").reshape(weight.shape).astype(np.float64)
    exact = ((weight - undone) ** 2).sum() / (weight.astype(np.float64) ** 2).sum()
    found = relative_mse(Dense(host(weight)), form)
    assert found == pytest.approx(exact, rel=1e-6)
    assert 0.002 < found < 0.02
    assert relative_mse(form, form) == 0.0
    assert relative_mse(dense(form), form) == 0.0


def test_weights_of_zeros() -> None:
    zeros, ones = Dense(host(np.zeros((2, 4)))), Dense(host(np.ones((2, 4))))
    assert relative_mse(zeros, zeros) == 0.0
    assert relative_mse(zeros, ones) == math.inf
    with pytest.raises(ValueError, match="against"):
        relative_mse(ones, Dense(host(np.ones((4, 2)))))


def test_each_token_counts_alike() -> None:
    states = np.random.default_rng(1).normal(0, 1, (4, 16))
    states[0] *= 3000  # as a sequence's first token often has
    wrong = states * 1.01
    error = StateError()
    error.add(host(states[:1]), host(wrong[:1]))
    error.add(host(states[1:]), host(wrong[1:]))
    assert error.sqnr_db == pytest.approx(40.0, abs=1e-3)
    alone = StateError()
    alone.add(host(states), host(np.concatenate([states[:1], wrong[1:]])))
    assert alone.sqnr_db == pytest.approx(40.0 - 10 * math.log10(0.75), abs=1e-3)


def test_states_that_are_the_same_or_not_finite() -> None:
    same = StateError()
    same.add(host(np.ones((2, 3))), host(np.ones((2, 3))))
    assert (same.sqnr_db, same.finite) == (math.inf, True)
    bad = StateError()
    bad.add(host(np.ones((2, 3))), host(np.array([[1, 2, np.nan], [1, 1, 1]])))
    assert math.isnan(bad.sqnr_db)
    assert not bad.finite
