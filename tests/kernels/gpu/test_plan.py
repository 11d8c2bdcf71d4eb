"""The plan of a decode step: who prepares whose inputs, and how many launches that takes."""

from typing import Any

import pytest
import torch

from llmrun.kernels.gpu.arrays import Fold, GpuArray
from llmrun.kernels.gpu.plan import Call, Plan, Read, foldable, plan
from llmrun.kernels.ops import Norm


def array() -> GpuArray:
    return GpuArray(torch.empty(1, 64))


def norm(**changes: Any) -> Norm:
    return Norm(torch.ones(64), 1e-5, **changes)


class Log:
    """Calls that note what they were asked to prepare."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def prepare(self, read: Read) -> None:
        self.said.append("prepare")

    def call(self, name: str, **attributes: Any) -> Call:
        def launch(wanted: bool, fold: Fold | None) -> None:
            with_gamma = " with gamma" if fold is not None else ""
            self.said.append(f"{name}{' prepares' + with_gamma if wanted else ''}")

        return Call(launch, **attributes)

    def run(self, calls: list[Call]) -> list[str]:
        made = plan(calls, self.prepare)
        self.said = []
        made.run()
        return self.said


def layer(log: Log, h: GpuArray, first: Norm | None, second: Norm | None) -> list[Call]:
    o, a = array(), array()
    return [
        log.call("qkv", reads=Read(h, first, 1)),
        log.call("append"),
        log.call("attend", prepares=o),
        log.call("out", reads=Read(o, None, 1), writes=h),
        log.call("gate_up", reads=Read(h, second, 1), prepares=a),
        log.call("down", reads=Read(a, None, 1), writes=h),
    ]


@pytest.mark.parametrize("n_layers", [1, 2, 32])
def test_a_step_takes_six_launches_per_layer_and_two(n_layers: int) -> None:
    # With the choice of an id that is 6 L + 3.
    log, h = Log(), array()
    calls = [log.call("embed", writes=h)]
    for _ in range(n_layers):
        calls += layer(log, h, norm(), norm())
    calls.append(log.call("head", reads=Read(h, norm(), 1)))
    said = log.run(calls)
    assert len(said) == 6 * n_layers + 2
    assert "prepare" not in said
    assert said[0] == "embed prepares with gamma"
    assert said[-2] == "down prepares with gamma"


def test_a_norm_that_does_not_commute_is_a_launch_of_its_own() -> None:
    log, h = Log(), array()
    centered = norm(centered=True)
    said = log.run(
        [log.call("embed", writes=h), *layer(log, h, centered, norm(beta=torch.ones(64)))]
    )
    assert said == [
        "embed", "prepare", "qkv", "append", "attend", "out", "prepare", "gate_up", "down",
    ]  # fmt: skip


def test_a_state_that_nobody_reads_is_not_prepared() -> None:
    log, h = Log(), array()
    said = log.run([log.call("embed", writes=h), log.call("down", writes=h)])
    assert said == ["embed", "down"]


def test_parallel_parts_read_what_was_prepared_once() -> None:
    log, h, shared = Log(), array(), norm()
    again = Norm(shared.gamma, shared.eps)  # each part binds its own
    o, a = array(), array()
    said = log.run(
        [
            log.call("embed", writes=h),
            log.call("qkv", reads=Read(h, shared, 1)),
            log.call("gate_up", reads=Read(h, again, 1), prepares=a),
            log.call("attend", prepares=o),
            log.call("out", reads=Read(o, None, 1), writes=h),
            log.call("down", reads=Read(a, None, 1), writes=h),
            log.call("head", reads=Read(h, norm(), 1)),
        ]
    )
    assert said == [
        "embed prepares with gamma", "qkv", "gate_up", "attend", "out",
        "down prepares with gamma", "head",
    ]  # fmt: skip


def test_another_norm_of_the_same_state_prepares_it_again() -> None:
    log, h = Log(), array()
    said = log.run(
        [
            log.call("embed", writes=h),
            log.call("qkv", reads=Read(h, norm(), 1)),
            log.call("gate_up", reads=Read(h, norm(), 1)),
        ]
    )
    assert said == ["embed prepares with gamma", "qkv", "prepare", "gate_up"]


def test_without_a_norm_the_state_is_prepared_as_it_is() -> None:
    log, h = Log(), array()
    said = log.run([log.call("embed", writes=h), log.call("qkv", reads=Read(h, None, 1))])
    assert said == ["embed prepares", "qkv"]


def test_an_op_that_cannot_prepare_what_it_writes() -> None:
    log, h = Log(), array()
    experts = log.call("experts", writes=h, folds=False)
    said = log.run([experts, log.call("head", reads=Read(h, norm(), 1))])
    assert said == ["experts", "prepare", "head"]


def test_an_op_alone_prepares_its_inputs() -> None:
    log, h = Log(), array()
    assert log.run([log.call("qkv", reads=Read(h, norm(), 1))]) == ["prepare", "qkv"]


def test_one_call_with_a_decision_on_the_host_keeps_the_plan_out_of_graphs() -> None:
    log, h = Log(), array()
    calls = [log.call("embed", writes=h), log.call("experts", writes=h, capturable=False)]
    assert not plan(calls, log.prepare).capturable
    assert plan(calls[:1], log.prepare).capturable
    assert isinstance(plan(calls, log.prepare), Plan)


def test_which_norms_commute() -> None:
    assert foldable(None)
    assert foldable(norm(offset=1.0))
    assert not foldable(norm(centered=True))
    assert not foldable(norm(beta=torch.zeros(64)))
