"""Factors against the inverse of the second moments, and what they are good for."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from llmrun.kernels.host import DType
from llmrun.quant.compensation import DAMPING, Prepared, prepare
from llmrun.quant.inputs import Inputs
from llmrun.quant.scheme import find, schemes

WEIGHTED = [name for name, scheme in schemes().items() if scheme.weighted]


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2000, 256)) @ rng.standard_normal((256, 256)) / 16
    return x * np.exp(rng.standard_normal(256))


def inputs_of(x: np.ndarray, oracle: SimpleNamespace, borders: tuple[int, ...] = ()) -> Inputs:
    gram = (x.T @ x / len(x)).astype(np.float32)
    diagonal = np.diagonal(gram)
    importance = np.maximum(diagonal / diagonal.mean(), 1e-4)
    edges = (0, *borders, len(gram))
    blocks = [gram[a:b, a:b].copy() for a, b in itertools.pairwise(edges)]
    return Inputs(len(x), oracle.make(importance), tuple(oracle.make(block) for block in blocks))


def test_factors_are_those_of_the_inverse(x: np.ndarray, oracle: SimpleNamespace) -> None:
    prepared = prepare(inputs_of(x, oracle))
    gram = (x.T @ x / len(x)).astype(np.float32).astype(np.float64)
    damped = gram + DAMPING[0] * np.diagonal(gram).mean() * np.eye(len(gram))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T  # H^-1 = U^T U
    expected = upper / np.diagonal(upper)[:, None]
    assert prepared.notes == ()
    assert np.allclose(oracle.read(prepared.factors[0]), expected, atol=1e-4)


def test_errors_go_where_the_inverse_sends_them(
    x: np.ndarray, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    """The textbook form of it: after column j, the rest of the row moves by
    -d [H^-1]_ji / [H^-1]_jj, where H^-1 is that of the columns from j on."""
    few = x[:, :96]
    host = oracle.make(gaussian(40, 96, 4), DType.F32)
    form = find("int8").quantize(host, inputs_of(few, oracle))
    scales = oracle.spread(form.scales, 96)
    gram = (few.T @ few / len(few)).astype(np.float32).astype(np.float64)
    gram += DAMPING[0] * np.diagonal(gram).mean() * np.eye(96)
    w = oracle.read(host).copy()
    q = np.empty_like(w)
    for j in range(96):
        inverse = np.linalg.inv(gram[j:, j:])
        q[:, j] = np.clip(np.rint(w[:, j] / scales[:, j]), -127, 127)
        d = w[:, j] - q[:, j] * scales[:, j]
        w[:, j:] -= np.outer(d, inverse[0] / inverse[0, 0])
    codes = oracle.levels(form).astype(int) - 128
    assert (codes == q).mean() > 0.995  # fp32 against fp64: a number next to a middle may move
    assert np.abs(codes - q).max() <= 1


@pytest.mark.parametrize("name", WEIGHTED)
def test_compensation_lowers_the_error_of_the_output(
    name: str, x: np.ndarray, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host, inputs = oracle.make(gaussian(48, 256), DType.BF16), inputs_of(x, oracle)
    scheme = find(name)

    def error(given: Inputs | Prepared | None) -> np.ndarray:
        return oracle.decode(scheme.quantize(host, given)) - oracle.read(host)

    alone, weighed, compensated = error(None), error(Prepared(inputs.importance)), error(inputs)
    columns = oracle.read(inputs.importance)
    # int8 has nothing to search, so it is the same with importance.
    assert (columns * np.square(weighed)).sum() <= (columns * np.square(alone)).sum()
    assert np.square(compensated @ x.T).sum() < 0.8 * np.square(weighed @ x.T).sum()


def test_blocks_are_worth_less_than_the_whole_but_more_than_nothing(
    x: np.ndarray, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host, scheme = oracle.make(gaussian(48, 256), DType.BF16), find("int4")
    errors = []
    for inputs in (
        inputs_of(x, oracle),
        inputs_of(x, oracle, (128,)),
        Prepared(inputs_of(x, oracle).importance),
    ):
        error = oracle.decode(scheme.quantize(host, inputs)) - oracle.read(host)
        errors.append(np.square(error @ x.T).sum())
    assert errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize(
    "damage", ["nan", "infinite", "negative", "all zero", "not definite", "nan importance"]
)
def test_q009_statistics_that_make_no_sense_are_left_out(
    name: str,
    damage: str,
    x: np.ndarray,
    oracle: SimpleNamespace,
    gaussian: Callable[..., np.ndarray],
) -> None:
    """Told in a note, no late crash, and the result is that of the statistics that are left."""
    inputs = inputs_of(x, oracle, (128,))
    assert inputs.gram is not None
    block, importance = oracle.read(inputs.gram[1]).copy(), oracle.read(inputs.importance).copy()
    if damage == "nan importance":
        importance[3] = np.nan
    elif damage == "all zero":
        block[:] = 0
    elif damage == "not definite":
        block[3, 90] = block[90, 3] = 1e6
    else:
        block[5, 5] = {"nan": np.nan, "infinite": np.inf, "negative": -1}[damage]
    broken = Inputs(9, oracle.make(importance), (inputs.gram[0], oracle.make(block)))
    prepared = prepare(broken)
    assert len(prepared.notes) == 1
    assert ("importance" if "importance" in damage else "block 2 of 2") in prepared.notes[0]
    host = oracle.make(gaussian(20, 256), DType.BF16)
    form = find(name).quantize(host, broken)
    assert np.isfinite(oracle.decode(form)).all()
    if "importance" not in damage:
        plain = find(name).quantize(host, Prepared(inputs.importance))
        assert (oracle.decode(form)[:, 128:] == oracle.decode(plain)[:, 128:]).all()


def test_q009_columns_nothing_excites_and_equal_columns_are_no_obstacle(
    x: np.ndarray, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    dead = x.copy()
    dead[:, 7], dead[:, 9] = 0, dead[:, 8]
    prepared = prepare(inputs_of(dead, oracle))
    assert prepared.notes == ()
    factor = oracle.read(prepared.factors[0])
    assert np.isfinite(factor).all()
    assert (factor[7, 8:] == 0).all()  # a dead column's error bothers nobody
    form = find("int4").quantize(oracle.make(gaussian(4, 256), DType.BF16), prepared)
    assert np.isfinite(oracle.decode(form)).all()


def test_q009_few_tokens_are_made_definite_by_damping(
    x: np.ndarray, oracle: SimpleNamespace
) -> None:
    prepared = prepare(inputs_of(x[:3], oracle))
    assert prepared.notes == ()
    assert np.isfinite(oracle.read(prepared.factors[0])).all()
