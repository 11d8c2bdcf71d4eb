"""Searching for launches with a clock that is a formula, and the file they are kept in."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from llmrun.errors import UsageError
from llmrun.kernels.forms import Form, GroupInt
from llmrun.kernels.gpu import arrays, device, linear, timing, tuned_file, tuning
from llmrun.kernels.gpu.arrays import GpuWeight
from llmrun.kernels.gpu.heuristics import Card, Launch, Shape, by_rule, choose
from llmrun.kernels.gpu.weights import take_over
from llmrun.kernels.host import DType
from llmrun.kernels.reference.arrays import to_host

CARD = Card(90, 132)
SHAPE = Shape("w4", 128, 4096, 4096)


def clock(best: Launch) -> Callable[[Launch], float]:
    """The further from one launch, the slower."""

    def seconds(launch: Launch) -> float:
        off = abs(launch.splits - best.splits) + abs(launch.warps - best.warps)
        return 1 + 0.1 * off + 0.05 * abs(launch.stages[0] - best.stages[0])

    return seconds


def test_the_search_finds_a_better_neighbour_within_its_limit() -> None:
    rule = by_rule(CARD, SHAPE)
    best = replace(rule, splits=rule.splits * 2, warps=4, stages=(5, *rule.stages[1:]))
    tried: list[Launch] = []

    def seconds(launch: Launch) -> float:
        tried.append(launch)
        return clock(best)(launch)

    found = tuning.search(CARD, SHAPE, seconds)
    assert found is not None
    assert found.launch == best
    assert found.seconds == 1
    assert found.rule_seconds == clock(best)(rule)
    assert tried[0] == rule
    assert found.tried == len(tried) == len(set(tried)) <= tuning.MOST
    assert all(launch.splits <= 16 for launch in tried)


@pytest.mark.parametrize("k", [64, 256, 1024, 14336])
def test_no_more_parts_than_columns_for_them(k: int) -> None:
    shape = replace(SHAPE, k=k)
    tried: list[Launch] = []

    def seconds(launch: Launch) -> float:
        tried.append(launch)
        return 1 / launch.splits

    tuning.search(CARD, shape, seconds)
    assert max(launch.splits for launch in tried) <= max(1, k // 256)


def test_a_gain_that_is_noise_changes_nothing() -> None:
    rule = by_rule(CARD, SHAPE)
    found = tuning.search(CARD, SHAPE, lambda launch: 1.0 if launch == rule else 0.985)
    assert found is not None
    assert (found.launch, found.seconds) == (rule, 1.0)


def test_launches_that_do_not_run_are_passed_over() -> None:
    rule = by_rule(CARD, SHAPE)
    found = tuning.search(CARD, SHAPE, lambda launch: None if launch.warps == 4 else launch.splits)
    assert found is not None
    assert found.launch.warps == rule.warps
    assert found.launch.splits < rule.splits
    assert tuning.search(CARD, SHAPE, lambda launch: None) is None


# --- weights ----------------------------------------------------------------------------------
def weight(n: int, k: int, group: int = 32) -> GpuWeight:
    random = torch.Generator().manual_seed(n)
    codes = to_host(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=random))
    scales = to_host(torch.rand(n, k // group, generator=random).bfloat16())
    form: Form = GroupInt(4, group, codes, scales, None, (n, k))
    assert scales.dtype is DType.BF16
    return take_over(form, torch.device("cpu"))


def test_weights_are_grouped_as_they_are_launched() -> None:
    q, k, odd = weight(128, 128), weight(64, 128), weight(64, 128, 64)
    assert tuning.groups([q, k, k]) == [((q, k, k), False)]
    assert tuning.groups([q, k, odd]) == [((q, k), False), ((odd,), False)]
    assert tuning.groups([q]) == [((q,), False)]
    assert tuning.groups([k, k]) == [((k, k), True)]
    assert tuning.groups([k, odd]) == [((k,), False), ((odd,), False)]


def test_a_weight_whose_columns_are_not_in_order_is_launched_by_itself() -> None:
    q, k = weight(128, 128), weight(64, 128)
    columns = torch.randperm(128, generator=torch.Generator().manual_seed(0)).int()
    other = replace(k, columns=columns)
    assert tuning.groups([q, k, other]) == [((q, k), False), ((other,), False)]
    assert tuning.groups([q, other, k]) == [((q,), False), ((other,), False), ((k,), False)]
    assert tuning.groups([other, other, other]) == [((other,), False)] * 3
    assert tuning.groups([k, other]) == [((k,), False), ((other,), False)]
    assert tuning.groups([other, other]) == [((other, other), True)]  # inputs ordered once for both


def test_a_second_card_is_measured_on_that_card(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights were loaded by another thread: this one's current device is still the first."""
    card = torch.device("cuda", 1)
    cuda.stands_in(monkeypatch, tuning, timing, device, arrays)
    cuda.get_device_properties = lambda device: SimpleNamespace(L2_cache_size=1 << 16)
    monkeypatch.setattr(tuning, "card_of", lambda device: CARD)
    rule = by_rule(CARD, Shape("w4", 32, 64, 128))

    def linears(*arguments: Any) -> None:
        (launch,) = arguments[6].values()
        arguments[3][0] = 1.0
        # Triton launches on the current device, wherever the tensors lie.
        cuda.work("launch", 0.5 if launch == rule else 2.0)

    monkeypatch.setattr(linear, "linears", linears)
    made = weight(64, 128)
    there = replace(made, codes=cuda.placed(made.codes, card))
    (found,) = tuning.measured([((there,), False)])
    assert found.seconds == pytest.approx(0.5e-3)
    assert "launch [cuda:1 side]" in cuda.log
    assert not any("cuda:0" in line for line in cuda.log if not line.startswith("wait "))
    assert cuda.current == torch.device("cuda", 0)


def test_every_shape_of_a_model_is_measured_once_on_all_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "MOST", 2)
    one, other, pair = weight(64, 128), weight(64, 128), weight(64, 256)
    launches = [((one,), False), ((pair, pair), True), ((other,), False)]
    turns: list[int] = []

    def timer(calls: Sequence[Callable[[], object]]) -> float:
        turns.append(len(calls))
        for call in calls:
            call()
        return 1.0

    found = list(tuning.measured(launches, timer))
    assert [one.shape for one in found] == [
        Shape("w4", 32, 64, 128),
        Shape("w4", 32, 64, 256, pair=True),
    ]
    assert turns == [2, 2, 1, 1]  # each with the rule's launch and one other


def test_a_launch_that_fails_or_computes_nonsense_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = by_rule(CARD, Shape("w4", 32, 64, 128))

    def linears(*arguments: object) -> None:
        y, tuned = arguments[3], arguments[6]
        assert isinstance(y, torch.Tensor)
        assert isinstance(tuned, dict)
        (launch,) = tuned.values()
        if launch.warps == 4:
            raise OutOfResources(1, 2, "shared memory")
        y[0] = 2.0 if launch.stages != rule.stages else 1.0

    monkeypatch.setattr(linear, "linears", linears)
    (found,) = tuning.measured([((weight(64, 128),), False)], lambda calls: 1.0)
    assert found.launch == rule
    assert found.tried > 3


# --- the file ---------------------------------------------------------------------------------
def test_what_is_kept_is_what_linears_take(tmp_path: Path) -> None:
    path = tuned_file.path_in(tmp_path / "tuning", "NVIDIA H200 (SXM)")
    assert path.name == "nvidia-h200--sxm-.json"
    assert tuned_file.read(path) == {}
    first, second = Launch(4, (5, 4, 3), 4), Launch(8)
    pair = replace(SHAPE, pair=True)
    tuned_file.write(path, "NVIDIA H200", {(90, SHAPE): second})
    tuned_file.write(path, "NVIDIA H200", {(90, SHAPE): first, (90, pair): second})
    kept = tuned_file.read(path)
    assert kept == {(90, SHAPE): first, (90, pair): second}
    assert choose(CARD, SHAPE, kept) == first
    assert choose(Card(80, 108), SHAPE, kept) == by_rule(Card(80, 108), SHAPE)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 2, "launches": []}',
        '{"schema": 1}',
        '{"schema": 1, "launches": [{"sm": 90}]}',
    ],
)
def test_a_file_that_makes_no_sense_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        tuned_file.read(path)
    assert str(path) in caught.value.what
    assert "llmrun tune" in caught.value.next_step
    with pytest.raises(UsageError):
        tuned_file.write(path, "card", {})


def test_a_launch_of_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    tuned_file.write(path, "card", {(90, SHAPE): Launch(4)})
    document = json.loads(path.read_text())
    document["launches"][0]["splits"] = 0
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="no launch like"):
        tuned_file.read(path)
