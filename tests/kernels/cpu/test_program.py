"""Recorded programs: replayed from the third step on, refused if they bake something in, cut short
between layers, and gone with the cache they were recorded for."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmrun.engine.phases import prefill
from llmrun.errors import InternalError
from llmrun.kernels.cpu.arrays import CpuKvLayer
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.ops import Attention, Span

Tiny = ModuleType

if REASON := problem():
    pytest.skip(REASON, allow_module_level=True)


@pytest.fixture(scope="module")
def made(tiny: Tiny) -> Any:
    return tiny.forms("int8 g128")


@pytest.fixture
def model(tiny: Tiny, made: Any) -> Any:
    return tiny.decoder(made, CpuBackend(2, huge_pages=False))


class Interrupts:
    """Answers yes at one of the times it is asked."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked == self.at


# --- recording ------------------------------------------------------------------------------------


def counted(model: Any) -> list[int]:
    """Counts how often the decoder issues its ops."""
    count = [0]
    issue = model._issue

    def counting(*arguments: object) -> Iterator[None]:
        count[0] += 1
        yield from issue(*arguments)

    model._issue = counting
    return count


def test_a_step_is_recorded_twice_and_replayed_from_then_on(tiny: Tiny, model: Any) -> None:
    count, cache = counted(model), tiny.cache(model)
    seen = []
    for position in range(5):
        model.forward([7], [Span(0, 0, 1, position)], cache.layers, [0])
        seen.append(count[0])
    assert seen == [1, 2, 2, 2, 2]
    # One program serves every number of tokens; another one the steps without a head.
    model.forward([7] * 20, [Span(0, 0, 20, 5)], cache.layers, [3, 19])
    assert count[0] == 2
    model.forward([7] * 20, [Span(0, 0, 20, 25)], cache.layers, [])
    assert count[0] == 3


def test_each_cache_has_programs_of_its_own(tiny: Tiny, model: Any) -> None:
    count = counted(model)
    text = tiny.ids(12)
    first = tiny.cache(model)
    want = tiny.run(model, text, [1] * 12, first)
    assert count[0] == 2
    assert tiny.run(model, text, [1] * 12) == want
    assert count[0] == 4
    first.truncate(0, 4)
    assert tiny.run(model, text[4:], [1] * 8, first) == want[4:]
    assert count[0] == 4


@pytest.mark.parametrize("op", ["embed", "attend"])
def test_an_op_that_bakes_in_the_position_is_named(tiny: Tiny, made: Any, op: str) -> None:
    cpu = CpuBackend(1, huge_pages=False)
    heads = tiny.SPEC.heads
    table = cpu.weight(made["model.embed_tokens.weight"])
    h, y, o = (cpu.empty((8, width)) for width in (128, 256, 128))
    kv, step = cpu.kv_layer(1, 32, heads, "f16"), cpu.step(8)

    def emit(position: int) -> Iterator[None]:
        wrong = position if op == "embed" else 0
        cpu.embed(step, table, 1.0 + wrong, h)
        wrong = position if op == "attend" else 0
        cpu.attend(step, y, Attention(heads, 1.0, window=9 + wrong), kv, o)
        yield

    def run(position: int) -> None:
        step.set([3], [Span(0, 0, 1, position)], [])
        cpu.run_layers(step, [kv], "key", lambda: emit(position), lambda: False)

    run(4)
    number = 0 if op == "embed" else 1
    with pytest.raises(InternalError, match=rf"op {op} \(instruction {number}\)"):
        run(5)


def test_another_number_of_ops_is_refused(tiny: Tiny, made: Any) -> None:
    cpu = CpuBackend(1, huge_pages=False)
    table, h = cpu.weight(made["model.embed_tokens.weight"]), cpu.empty((8, 128))
    kv, step = cpu.kv_layer(1, 32, tiny.SPEC.heads, "f16"), cpu.step(8)
    step.set([3], [Span(0, 0, 1, 0)], [])

    def emit(count: int) -> Iterator[None]:
        for _ in range(count):
            cpu.embed(step, table, 1.0, h)
        yield

    cpu.run_layers(step, [kv], "key", lambda: emit(2), lambda: False)
    with pytest.raises(InternalError, match="changes per token"):
        cpu.run_layers(step, [kv], "key", lambda: emit(1), lambda: False)


# --- interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("warm", [0, 1, 2], ids=["first", "second", "replayed"])
@pytest.mark.parametrize("layer", [1, 2])
def test_16_an_interrupt_in_prefill_is_obeyed_within_a_layer(
    tiny: Tiny, made: Any, replay: bool, warm: int, layer: int
) -> None:
    model = tiny.decoder(made, CpuBackend(2, replay=replay, huge_pages=False))
    text = tiny.ids(60)
    want = tiny.run(model, text, [60])
    cache = tiny.cache(model)
    for _ in range(warm):
        tiny.run(model, text, [60], cache)
        cache.truncate(0, 0)
    run_layers = CountingRuns(model.backend)
    interrupt = Interrupts(at=1 + layer)  # the first time is before the chunk
    assert prefill(model, cache, text, interrupt=interrupt) is None
    assert interrupt.asked == 1 + layer
    assert run_layers.ops() == 1 + 6 * layer  # the embedding, and no layer behind the interrupt
    assert cache.length(0) == 0
    assert tiny.run(model, text, [60], cache) == want  # nothing of it is left
    assert tiny.run(model, text[:5], [1] * 5, cache)


class CountingRuns:
    """Counts the instructions a backend runs natively."""

    def __init__(self, backend: Any) -> None:
        self.count = 0
        run: Callable[..., None] = backend._run

        def counting(first: int, length: int, step: object) -> None:
            self.count += length
            run(first, length, step)

        backend._run = counting

    def ops(self) -> int:
        return self.count


def test_16_an_interrupt_between_the_chunks_of_a_prompt(tiny: Tiny, model: Any) -> None:
    text = tiny.ids(620)
    cache = tiny.cache(model)
    interrupt = Interrupts(at=1 + 3 + 1)  # behind the layers of the first chunk
    assert prefill(model, cache, text, interrupt=interrupt) is None
    assert cache.ids(0) == tuple(text[:300])


# --- chunks without a head ------------------------------------------------------------------------


def test_steps_without_a_head_run_no_empty_part(tiny: Tiny, made: Any) -> None:
    # A native call of no instruction has no barrier: the caller would leave while workers still
    # read what it called for, and they would take part in the next call twice.
    cpu = CpuBackend(2, huge_pages=False)
    model, text = tiny.decoder(made, cpu), tiny.ids(20)
    cache = tiny.cache(model)
    want = tiny.run(model, text, [16, 4])[16:]
    lengths = []
    run = cpu._run

    def recording(first: int, length: int, step: Any) -> None:
        lengths.append(length)
        run(first, length, step)

    cpu._run = recording  # type: ignore[method-assign]
    for _ in range(300):
        model.forward(text[:16], [Span(0, 0, 16, 0)], cache.layers, [])
        assert tiny.logits(model, [Span(0, 0, 4, 16)], text[16:], cache) == want
    assert min(lengths) > 0


def test_a_native_call_of_no_instruction_does_nothing(tiny: Tiny, made: Any) -> None:
    cpu = CpuBackend(2, huge_pages=False)
    model, text = tiny.decoder(made, cpu), tiny.ids(4)
    cache, step = tiny.cache(model), cpu.step(1)
    want = tiny.run(model, text, [4])
    for _ in range(300):
        cpu._library.llmr_run(cpu._context, None, 0, step.native, 0)
        assert tiny.logits(model, [Span(0, 0, 4, 0)], text, cache) == want


# --- lifetime -------------------------------------------------------------------------------------


def test_programs_end_with_their_cache(tiny: Tiny, model: Any) -> None:
    text = tiny.ids(6)

    def used() -> list[weakref.ref[Any]]:
        cache = tiny.cache(model)
        tiny.run(model, text, [1] * 6, cache)
        layer = cache.layers[0]
        assert isinstance(layer, CpuKvLayer)
        return [weakref.ref(layer), *(weakref.ref(program) for program in layer.programs.values())]

    gc.disable()  # no cycle either: a cache is large, and nobody knows when cycles are collected
    try:
        references = [reference for _ in range(3) for reference in used()]
        assert len(references) == 6
        assert [reference() for reference in references] == [None] * 6
    finally:
        gc.enable()


LEAK = """
import sys
sys.path.insert(0, sys.argv[1])
import psutil, tiny
from llmrun.kernels.cpu.backend import CpuBackend

model = tiny.decoder(tiny.forms("int8 g128"), CpuBackend(2, huge_pages=False))
text = tiny.ids(40)

def used(count):
    for _ in range(count):
        tiny.run(model, text, [34, *[1] * 6])
    memory = psutil.Process().memory_full_info()
    return memory.uss, memory.vms, len(__import__("gc").get_objects())

used(10)
before, after = used(5), used(50)
print(*(b - a for a, b in zip(before, after)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process by its kinds")
def test_50_caches_leave_nothing(tmp_path: Path) -> None:
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", LEAK, folder],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
        timeout=120,
    )
    resident, reserved, objects = map(int, done.stdout.split())
    # A cache reserves 983 kB, of which it touches a part, and its programs hold 100 objects.
    assert resident < 1_000_000
    assert reserved < 2_000_000
    assert objects < 50
