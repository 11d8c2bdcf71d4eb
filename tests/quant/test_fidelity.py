"""Fidelity against formulas in float64, written once more and naively."""

import math

import numpy as np
import pytest

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.fidelity import Comparison, Fidelity, predictions, spread

VOCAB, PADDED = 50, 64


def host(array: np.ndarray) -> HostArray:
    array = np.ascontiguousarray(array, dtype="<f4")
    return HostArray(DType.F32, array.shape, memoryview(array).cast("B"))


def compare(ref: np.ndarray, own: np.ndarray, targets: list[int], block: int = 7) -> Fidelity:
    comparison = Comparison()
    for start in range(0, len(ref), block):
        rows = slice(start, start + block)
        comparison.add(
            predictions(host(ref[rows]), VOCAB), predictions(host(own[rows]), VOCAB), targets[rows]
        )
    return comparison.finish()


def logits(n: int, seed: int, scale: float = 4.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (n, PADDED)).astype(np.float32)


def naive(row: np.ndarray) -> np.ndarray:
    """Probabilities in float64, without a trick."""
    e = np.exp(row[:VOCAB].astype(np.float64))
    return e / e.sum()


@pytest.fixture(scope="module")
def case() -> tuple[np.ndarray, np.ndarray, list[int]]:
    ref = logits(400, 1)
    own = ref + logits(400, 2, 0.3)
    ref[:, VOCAB:] = 99.0  # padding rows of the head: whatever they say does not count
    targets = np.random.default_rng(3).integers(0, VOCAB, 400).tolist()
    return ref, own, targets


def test_every_figure_is_that_of_the_naive_formula(
    case: tuple[np.ndarray, np.ndarray, list[int]],
) -> None:
    ref, own, targets = case
    found = compare(ref, own, targets)
    p, q = np.array([naive(r) for r in ref]), np.array([naive(r) for r in own])
    kl = (p * np.log(p / q)).sum(axis=1)
    row = np.arange(400)
    pt, qt = p[row, targets], q[row, targets]
    near = {"rel": 2e-5, "abs": 1e-7}
    assert found.tokens == 400
    assert found.kl.mean == pytest.approx(kl.mean(), **near)
    assert found.kl.se == pytest.approx(kl.std(ddof=1) / 20, **near)
    assert found.kl.max == pytest.approx(kl.max(), **near)
    assert found.kl.min == pytest.approx(kl.min(), **near)
    for name, quantile in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("p1", 0.01)):
        expected = np.quantile(kl, quantile, method="inverted_cdf")
        assert getattr(found.kl, name) == pytest.approx(expected, **near)
    assert found.kl.p99_9 is None  # 400 values have no 99.9th percentile
    assert found.rms_delta_p == pytest.approx(math.sqrt(((qt - pt) ** 2).mean()), **near)
    assert found.delta_p.mean == pytest.approx((qt - pt).mean(), rel=1e-4)
    same = p.argmax(axis=1) == q.argmax(axis=1)
    assert found.top1.value == same.mean()
    assert found.top1.se == pytest.approx(math.sqrt(same.mean() * (1 - same.mean()) / 399))
    sure = p.max(axis=1) > 0.9
    assert (found.top1_confident.tokens, found.top1_confident.value) == (
        sure.sum(),
        same[sure].mean(),
    )
    assert found.ppl == pytest.approx(np.exp(-np.log(qt).mean()), **near)
    assert found.ppl_reference == pytest.approx(np.exp(-np.log(pt).mean()), **near)
    ratio = np.log(pt) - np.log(qt)
    assert found.log_ppl_ratio == pytest.approx(ratio.mean(), rel=1e-4)
    assert found.log_ppl_ratio_se == pytest.approx(ratio.std(ddof=1) / 20, rel=1e-4)
    assert found.ppl_ratio == pytest.approx(found.ppl / found.ppl_reference, **near)  # type: ignore[operator]
    assert found.correlation == pytest.approx(np.corrcoef(np.log(pt), np.log(qt))[0, 1], **near)
    for bucket in found.kl_by_confidence:
        inside = (p.max(axis=1) >= bucket.low) & (p.max(axis=1) < bucket.high)
        assert bucket.tokens == inside.sum()
        assert bucket.kl == (pytest.approx(kl[inside].mean(), **near) if inside.any() else None)
    assert sum(bucket.tokens for bucket in found.kl_by_confidence) == 400


def test_two_distributions_known_in_closed_form() -> None:
    """Over two ids, p = (3/4, 1/4) and q = (1/2, 1/2)."""
    ref, own = np.full((1, PADDED), -80.0), np.full((1, PADDED), -80.0)
    ref[0, :2], own[0, :2] = (math.log(3), 0.0), (0.0, 0.0)
    found = compare(ref, own, [1])
    assert found.kl.mean == pytest.approx(
        0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5), rel=1e-6
    )
    assert found.delta_p.mean == pytest.approx(0.25, rel=1e-6)
    assert (found.ppl, found.ppl_reference) == (pytest.approx(2.0), pytest.approx(4.0))
    assert found.kl.se is None


def test_a_child_that_is_its_reference_has_kl_0_and_agrees_everywhere() -> None:
    ref = logits(30, 5)
    found = compare(ref, ref.copy(), [1] * 30)
    assert (found.kl.mean, found.kl.max, found.kl.min) == (0.0, 0.0, 0.0)
    assert (found.top1.value, found.rms_delta_p, found.log_ppl_ratio) == (1.0, 0.0, 0.0)
    assert found.correlation == 1.0


def test_logits_of_any_size_do_not_overflow() -> None:
    ref = logits(5, 6) * 1000
    found = compare(ref, ref + 5000, [0] * 5)  # a constant more changes no distribution
    assert found.kl.mean == pytest.approx(0.0, abs=1e-6)
    assert found.nonfinite == 0


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_position_that_is_not_finite_is_counted_and_left_out(which: int, bad: float) -> None:
    ref, own = logits(20, 7), logits(20, 8)
    targets = list(range(20))
    clean = compare(np.delete(ref, 11, 0), np.delete(own, 11, 0), targets[:11] + targets[12:])
    (ref, own)[which][11, 3] = bad
    found = compare(ref, own, targets)
    assert (found.tokens, found.nonfinite) == (19, 1)
    assert found.kl == clean.kl
    assert found.ppl == clean.ppl


def test_nothing_finite_gives_no_figures() -> None:
    found = compare(np.full((3, PADDED), np.nan), logits(3, 9), [0, 1, 2])
    assert (found.tokens, found.nonfinite) == (0, 3)
    assert (found.kl.mean, found.ppl, found.top1.value, found.correlation) == (None,) * 4


def test_blocks_of_any_size_give_the_same(case: tuple[np.ndarray, np.ndarray, list[int]]) -> None:
    assert compare(*case, block=1) == compare(*case, block=400)


def test_a_percentile_needs_a_value_beyond_it() -> None:
    assert spread(np.arange(999.0)).p99_9 is None
    assert spread(np.arange(1000.0)).p99_9 == 998.0
    assert spread(np.arange(1000.0)).p0_1 == 0.0
    assert spread(np.arange(1.0)).median == 0.0
