"""Which units of a mixed recipe get 8 bits."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.errors import UsageError
from llmrun.quant.mixing import Unit, Upgrade, budget_bytes, chosen, summary, unit_of
from llmrun.quant.roles import QUANTIZED_ROLES, Role


@pytest.mark.parametrize(
    ("name", "role", "unit"),
    [
        ("model.layers.3.self_attn.q_proj.weight", Role.ATTN_QKV, Unit(3, Role.ATTN_QKV)),
        ("model.layers.3.self_attn.v_proj.weight", Role.ATTN_QKV, Unit(3, Role.ATTN_QKV)),
        ("model.layers.12.mlp.gate_up_proj.weight", Role.GATE_UP, Unit(12, Role.GATE_UP)),
        ("model.layers.0.mlp.experts.7.up_proj.weight", Role.EXPERTS, Unit(0, Role.EXPERTS)),
        ("model.layers.0.mlp.gate.weight", Role.ROUTER, None),
        ("model.embed_tokens.weight", Role.EMBEDDING, None),
        ("lm_head.weight", Role.HEAD, None),
    ],
)
def test_what_engines_fuse_is_one_unit(name: str, role: Role, unit: Unit | None) -> None:
    assert unit_of(name, role) == unit


def upgrade(layer: int, added_bytes: int, gain: float) -> Upgrade:
    return Upgrade(Unit(layer, Role.DOWN), added_bytes, gain)


def test_gain_per_byte_decides_not_gain() -> None:
    large, small = upgrade(0, 100, 5.0), upgrade(1, 10, 1.0)
    assert chosen([large, small], 100) == {small.unit}


def test_what_no_longer_fits_makes_room_for_smaller_ones() -> None:
    candidates = [upgrade(0, 60, 9.0), upgrade(1, 60, 8.0), upgrade(2, 40, 1.0)]
    assert chosen(candidates, 100) == {Unit(0, Role.DOWN), Unit(2, Role.DOWN)}


def test_no_bits_for_what_they_do_not_improve() -> None:
    assert chosen([upgrade(0, 1, 0.0), upgrade(1, 1, -1.0)], 100) == frozenset()


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 10)), min_size=1, max_size=8),
    st.integers(0, 200),
)
def test_within_budget_and_not_far_from_the_best_choice(
    sizes: list[tuple[int, float]], budget: int
) -> None:
    candidates = [upgrade(layer, size, gain) for layer, (size, gain) in enumerate(sizes)]
    picked = chosen(candidates, budget)
    cost = sum(c.added_bytes for c in candidates if c.unit in picked)
    gain = sum(c.gain for c in candidates if c.unit in picked)
    best = max(
        sum(c.gain for c in some)
        for count in range(len(candidates) + 1)
        for some in combinations(candidates, count)
        if sum(c.added_bytes for c in some) <= budget
    )
    assert cost <= budget
    # A greedy choice lacks less than the one item that first did not fit.
    assert best <= gain + max(c.gain for c in candidates) + 1e-9


def test_a_target_becomes_bytes() -> None:
    assert budget_bytes(5.0, 1000, 562, 1000) == 63


@pytest.mark.parametrize("target", [4.4, 8.2])
def test_a_target_out_of_reach_is_refused_with_its_limits(target: float) -> None:
    with pytest.raises(UsageError, match=r"4\.496.*8\.000") as error:
        budget_bytes(target, 1000, 562, 1000)
    assert "--target-bpw" in error.value.next_step


def test_summary_draws_neighbours_together() -> None:
    widened = {Unit(layer, Role.DOWN) for layer in (0, 1, 2, 7)} | {Unit(7, Role.ATTN_QKV)}
    assert summary(widened) == "attn_qkv of 7; down of 0-2, 7"


def test_every_quantized_role_has_units() -> None:
    assert all(unit_of("model.layers.1.x.weight", role) for role in QUANTIZED_ROLES)
