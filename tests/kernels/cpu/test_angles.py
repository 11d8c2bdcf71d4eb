"""Angle tables are shared, few, and never gone while a recorded program points to them."""

import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from llmrun.kernels.cpu.angles import RECENT, Angles, AngleTables
from llmrun.kernels.cpu.arrays import PROGRAMS
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.ops import Heads, Rope, Span, never

if REASON := problem():
    pytest.skip(REASON, allow_module_level=True)

HEADS = Heads(2, 1, 16)
CAPACITY = 64


def rope(number: int) -> Rope:
    return Rope((1.0 / (number + 1), 0.1))


def test_one_table_for_a_rope_and_capacity() -> None:
    tables = AngleTables()
    first = tables.of(rope(0), CAPACITY)
    assert tables.of(Rope(rope(0).inv_freq), CAPACITY) is first
    assert tables.of(rope(0), 2 * CAPACITY) is not first
    assert tables.of(Rope(rope(0).inv_freq, 1.5), CAPACITY) is not first


def test_the_last_used_tables_stay() -> None:
    tables = AngleTables()
    made = [weakref.ref(tables.of(rope(number), CAPACITY)) for number in range(RECENT)]
    tables.of(rope(0), CAPACITY)
    tables.of(rope(RECENT), CAPACITY)
    assert [table() is None for table in made] == [number == 1 for number in range(RECENT)]


def test_a_table_that_is_held_stays_the_one() -> None:
    tables = AngleTables()
    held = tables.of(rope(0), CAPACITY)
    for number in range(1, 3 * RECENT):
        tables.of(rope(number), CAPACITY)
    assert tables.of(rope(0), CAPACITY) is held


class Steps:
    """Steps of one token that rotate by the rope of a stage, recorded for a cache."""

    def __init__(self, tiny: ModuleType, *, replay: bool) -> None:
        self.cpu = CpuBackend(1, huge_pages=False, replay=replay)
        form = tiny.weight("f16", 8, 64, seed=1)
        self.table = self.cpu.weight(form)
        self.y = self.cpu.empty((1, 64))
        self.step = self.cpu.step(1)

    def cache(self) -> Any:
        return self.cpu.kv_layer(1, CAPACITY, HEADS, "f32")

    def run(self, cache: Any, stage: int, position: int) -> bytes:
        def emit() -> Iterator[None]:
            self.cpu.embed(self.step, self.table, 1.0, self.y)
            self.cpu.rope_append(self.step, self.y, HEADS, rope(stage), None, None, cache)
            yield

        self.step.set([position % 8], [Span(0, 0, 1, position)], [])
        assert self.cpu.run_layers(self.step, [cache], stage, emit, never)
        return bytes(self.cpu.to_host(self.y, 1).data)


STAGES = [0, 0, 0, 1, 1, 0, 2, 3, 4, 5, 5, 5, 0, 0, 0, *range(6, 20), 0, 0, 0, 5, 5]


def test_a_rope_that_changes_many_times(tiny: ModuleType) -> None:
    replayed, plain = Steps(tiny, replay=True), Steps(tiny, replay=False)
    caches = replayed.cache(), plain.cache()
    living: list[weakref.ref[Angles]] = []
    for position, stage in enumerate(STAGES):
        got = replayed.run(caches[0], stage, position)
        assert got == plain.run(caches[1], stage, position), (position, stage)
        living.append(weakref.ref(replayed.cpu._angles.of(rope(stage), CAPACITY)))
        assert len(caches[0].programs) <= PROGRAMS
        tables = {id(table) for ref in living if (table := ref()) is not None}
        assert len(tables) <= PROGRAMS + RECENT


def test_the_last_used_programs_stay(tiny: ModuleType) -> None:
    steps = Steps(tiny, replay=True)
    cache = steps.cache()
    for stage in (*range(PROGRAMS), 0, PROGRAMS):
        steps.run(cache, stage, 0)
    assert list(cache.programs) == [*range(2, PROGRAMS), 0, PROGRAMS]


def test_a_table_stays_between_the_recordings_of_a_program(tiny: ModuleType) -> None:
    steps = Steps(tiny, replay=True)
    first, others = steps.cache(), [steps.cache() for _ in range(2 * RECENT)]
    want = steps.run(first, 0, 7)
    for stage, cache in enumerate(others):
        steps.run(cache, 1 + stage, 7)
    # Another table would be another address, which recording twice finds and refuses.
    assert [steps.run(first, 0, 7) for _ in range(3)] == [want] * 3


def test_tables_go_with_their_programs(tiny: ModuleType) -> None:
    steps = Steps(tiny, replay=True)
    cache = steps.cache()
    steps.run(cache, 0, 0)
    table = weakref.ref(steps.cpu._angles.of(rope(0), CAPACITY))
    for stage in range(1, 1 + RECENT):
        steps.cpu._angles.of(rope(stage), CAPACITY)
    assert table() is not None
    del cache
    assert table() is None
