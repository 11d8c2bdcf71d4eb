"""Launches are found for any shape, measured ones first, and fill a card."""

import pytest

from llmrun.kernels.gpu.heuristics import Card, Launch, Shape, by_rule, choose

H200 = Card(90, 132)


@pytest.mark.parametrize(
    ("n", "k", "splits"),
    [(6144, 4096, 4), (4096, 4096, 8), (28672, 4096, 1), (4096, 14336, 8), (128256, 4096, 1)],
)
def test_enough_programs_for_a_large_card(n: int, k: int, splits: int) -> None:
    assert choose(H200, Shape("w4", 128, n, k)).splits == splits


@pytest.mark.parametrize("n", [1, 64, 1000, 1 << 20])
@pytest.mark.parametrize("k", [1, 128, 1000, 1 << 16])
def test_any_shape_has_a_launch_whose_parts_hold_tiles(n: int, k: int) -> None:
    for sms in (20, 132):
        launch = by_rule(Card(89, sms), Shape("dense", 0, n, k))
        assert 1 <= launch.splits <= max(1, k // 128)


def test_what_was_measured_comes_first_and_serves_its_neighbours() -> None:
    shape = Shape("w4", 128, 4096, 4096)
    measured = Launch(2, (5, 4, 3), 4)
    tuned = {(90, shape): measured, (90, Shape("w4", 128, 4096, 14336)): Launch(3)}
    assert choose(H200, shape, tuned) is measured
    assert choose(H200, Shape("w4", 128, 5120, 5120), tuned) is measured
    for other in (
        Shape("w4", 128, 128256, 4096),
        Shape("w8", 128, 4096, 4096),
        Shape("w4", 32, 4096, 4096),
        Shape("w4", 128, 4096, 4096, pair=True),
    ):
        assert choose(H200, other, tuned) == by_rule(H200, other)
    assert choose(Card(80, 108), shape, tuned) == by_rule(Card(80, 108), shape)


def test_parts_do_not_depend_on_the_rows() -> None:
    launch = Launch(4, (5, 4, 3))
    assert [launch.stages_for(m) for m in (1, 8, 9, 16, 17, 32)] == [5, 5, 4, 4, 3, 3]
