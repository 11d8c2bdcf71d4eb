"""The order of sums, and what can weigh errors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmrun.quant.weighting import lane_sum, usable

F32 = np.float32


def lanes(terms: np.ndarray) -> F32:
    lane = [F32(0)] * 8
    for k, term in enumerate(terms):
        lane[k % 8] = lane[k % 8] + term
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_order_of_a_sum_is_the_written_one(group: int) -> None:
    """Values of very different size: any other order rounds differently somewhere."""
    rng = np.random.default_rng(group)
    terms = np.exp(6 * rng.standard_normal((group, 200))).astype(F32)
    expected = [lanes(column) for column in terms.T]
    assert any(column.sum() != total for column, total in zip(terms.T, expected, strict=True))
    assert lane_sum(torch.from_numpy(terms.copy())).tolist() == expected


@pytest.mark.parametrize(
    ("values", "can"),
    [((1, 2), True), ((1e-4, 9e9), True), ((1, 0), False), ((-1, 3), False)]
    + [((1, bad), False) for bad in (float("nan"), float("inf"))],
)
def test_importance_is_a_positive_number(
    values: tuple[float, ...], can: bool, oracle: SimpleNamespace
) -> None:
    assert usable(oracle.make(np.array(values))) == can
