"""The signed-scale search against the written procedure, group by group in numpy float32."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.compensation import Prepared
from llmrun.quant.int4 import quantize

F32 = np.float32
FLOATS = [DType.BF16, DType.F16, DType.F32]


def round_to(values: np.ndarray, dtype: DType, oracle: SimpleNamespace) -> np.ndarray:
    return oracle.read(oracle.make(values, dtype)).astype(F32)


def lane_sum(terms: np.ndarray) -> F32:
    lane = [F32(0)] * 8
    for k, term in enumerate(terms):
        lane[k % 8] = lane[k % 8] + term
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]))


def search(w: np.ndarray, dtype: DType, oracle: SimpleNamespace) -> tuple[F32, np.ndarray]:
    """The procedure as written: (stored scale, codes -8..7) of one group of float32."""
    extreme = max(range(len(w)), key=lambda k: (abs(w[k]), -k))
    s0 = w[extreme] / F32(-8)
    best = (np.inf, F32(1), np.zeros(len(w)))
    for step in range(21):
        s = round_to(np.array([s0 * F32(0.70 + 0.02 * step)]), dtype, oracle)[0]
        if s == 0 or not np.isfinite(s):
            s, q = F32(1), np.zeros(len(w), F32)
        else:
            q = np.clip(np.rint(w / s), -8, 7).astype(F32)
        d = w - q * s
        error = lane_sum(d * d)
        if error < best[0]:
            best = (error, s, q)
    return best[1], best[2]


def assert_equals_search(host: HostArray, preferred: int, oracle: SimpleNamespace) -> None:
    form = quantize(host, preferred=preferred)
    groups = oracle.read(host).astype(F32).reshape(-1, form.group)
    codes = oracle.levels(form).reshape(groups.shape).astype(int) - 8
    scales = oracle.read(form.scales).flatten()
    for w, q, s in zip(groups, codes, scales, strict=True):
        expected_s, expected_q = search(w, host.dtype, oracle)
        assert s == expected_s
        assert (q == expected_q).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("preferred", [32, 64, 128])
def test_bytes_equal_the_search(
    dtype: DType, preferred: int, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    assert_equals_search(oracle.make(gaussian(15, 128, seed=preferred), dtype), preferred, oracle)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    exponent=st.integers(-7, 7),
    tail=st.sampled_from([0.0, 1.5, 3.0]),
    dtype=st.sampled_from(FLOATS),
)
def test_bytes_equal_the_search_on_odd_data(
    seed: int, exponent: int, tail: float, dtype: DType, oracle: SimpleNamespace
) -> None:
    """Heavy tails, ties and coarse grids, at any scale where the plain formula does not vanish."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((2, 64)) * np.exp(tail * rng.standard_normal((2, 64)))
    values[1] = np.rint(values[1] * 2)  # a grid: many ties in magnitude
    if dtype is DType.F16:
        exponent = max(-3, min(exponent, 1))
    values = np.clip(values, -500, 500) * 10.0**exponent
    assert_equals_search(oracle.make(values.astype(F32), dtype), 32, oracle)


@pytest.mark.parametrize("exponent", [-146, -126, -120, -60, 40, 100, 120])
def test_a_power_of_two_changes_nothing_but_the_scale(
    exponent: int, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    """squares would vanish or overflow in fp32 at these sizes; the choice must not notice."""
    values = np.ldexp(np.rint(gaussian(4, 64) * 2000), -3).astype(F32)  # few bits: no rounding
    values = np.rint(values)
    plain = quantize(oracle.make(values, DType.F32))
    scaled = quantize(oracle.make(np.ldexp(values, exponent), DType.F32))
    if exponent > -130:  # below, the stored scale itself loses bits
        assert bytes(plain.codes.data) == bytes(scaled.codes.data)
        ratio = oracle.read(scaled.scales) / oracle.read(plain.scales)
        assert (ratio == 2.0**exponent).all()
    error = np.abs(oracle.decode(scaled) - oracle.read(oracle.make(np.ldexp(values, exponent))))
    assert error.max() <= 0.3 * np.abs(np.ldexp(values, exponent)).max()


def test_ties_go_to_the_lowest_k(oracle: SimpleNamespace) -> None:
    values = np.zeros((2, 32), F32)
    values[0, [3, 9]] = (-1.0, 1.0)
    values[1, [3, 9]] = (1.0, -1.0)
    form = quantize(oracle.make(values, DType.BF16))
    scales = oracle.read(form.scales).flatten()
    assert scales[0] > 0 > scales[1]  # e on code -8: a positive e has a negative scale
    levels = oracle.levels(form).astype(int) - 8
    # The tied weight of the other sign would need +8; the search trades it against -8.
    assert (levels[0, [3, 9]] == levels[1, [3, 9]]).all()
    assert levels[0, 3] < 0 < levels[0, 9]


def test_about_half_the_scales_are_negative(
    oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    scales = oracle.read(quantize(oracle.make(gaussian(64, 512), DType.BF16)).scales)
    assert 0.4 < (scales < 0).mean() < 0.6


@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_that_are_not_clipped_are_within_half_a_step(
    dtype: DType, oracle: SimpleNamespace
) -> None:
    rng = np.random.default_rng(5)
    values = (rng.standard_t(3, (65, 512)) * 0.02).astype(F32)
    host = oracle.make(values, dtype)
    form = quantize(host)
    q = oracle.levels(form).astype(int) - 8
    inside = (q > -8) & (q < 7)
    half = np.abs(oracle.spread(form.scales, 512)) / 2
    error = np.abs(oracle.decode(form) - oracle.read(host))
    assert (error[inside] <= half[inside] * (1 + 1e-5)).all()
    assert inside.mean() > 0.9


def test_the_search_beats_its_starting_point(
    oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    """Squared error of the search <= that of c = 1 alone, in every group."""
    host = oracle.make(gaussian(32, 512), DType.BF16)
    groups = oracle.read(host).reshape(-1, 32)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    s = round_to((extreme / -8).astype(F32), DType.BF16, oracle).astype(np.float64)
    start = s * np.clip(np.rint(groups / s), -8, 7)
    found = oracle.decode(quantize(host)).reshape(-1, 32)

    def squared(restored: np.ndarray) -> np.ndarray:
        return np.square(groups - restored).sum(axis=1)

    assert (squared(found) <= squared(start) * (1 + 1e-5)).all()
    assert squared(found).sum() < 0.95 * squared(start).sum()


def test_a_constant_group_is_exact(oracle: SimpleNamespace) -> None:
    for value in (1.0, -3.0, 0.1875):
        host = oracle.make(np.full((3, 64), value, F32), DType.BF16)
        assert (oracle.decode(quantize(host)) == value).all()


def test_one_outlier_keeps_its_value_and_its_group(oracle: SimpleNamespace) -> None:
    values = np.full((1, 96), 1e-3, F32)
    values[0, 40] = 8.0
    restored = oracle.decode(quantize(oracle.make(values, DType.BF16)))
    assert restored[0, 40] == 8.0
    assert (restored[0, 32:64] == 0).sum() == 31
    assert np.allclose(restored[0, :32], values[0, :32], rtol=5e-3)


def weighted_search(
    w: np.ndarray, h: np.ndarray, dtype: DType, oracle: SimpleNamespace
) -> tuple[F32, np.ndarray]:
    """As written for known importance: errors count by h, both ends, two refits."""
    extreme = max(range(len(w)), key=lambda k: (abs(w[k]), -k))
    best = (np.inf, F32(1), np.zeros(len(w), F32))

    def judge(s: F32) -> None:
        nonlocal best
        s = round_to(np.array([s]), dtype, oracle)[0]
        q = np.clip(np.rint(w / s), -8, 7).astype(F32)
        d = w - q * s
        error = lane_sum(d * d * h)
        if error < best[0]:
            best = (error, s, q)

    for end in (-8, 7):
        for step in range(21):
            judge(F32(w[extreme] / F32(end)) * F32(0.70 + 0.02 * step))
    for _ in range(2):
        q = best[2]
        judge(lane_sum(q * h * w) / lane_sum(q * h * q))
    return best[1], best[2]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("preferred", [32, 128])
def test_bytes_equal_the_search_with_importance(
    dtype: DType, preferred: int, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(5, 256, seed=preferred), dtype)
    h = np.exp(np.random.default_rng(1).standard_normal(256)).astype(F32)
    form = quantize(host, Prepared(oracle.make(h)), preferred=preferred)
    groups = oracle.read(host).astype(F32).reshape(-1, preferred)
    codes = oracle.levels(form).reshape(groups.shape).astype(int) - 8
    scales = oracle.read(form.scales).flatten()
    columns = np.tile(h.reshape(-1, preferred), (5, 1))
    for w, own, q, s in zip(groups, columns, codes, scales, strict=True):
        expected_s, expected_q = weighted_search(w, own, dtype, oracle)
        assert s == expected_s
        assert (q == expected_q).all()
