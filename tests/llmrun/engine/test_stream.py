import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.engine.events import Finish, Phase, TokenEvent
from llmrun.engine.generate import generate
from llmrun.engine.sampler import Sampler
from llmrun.engine.stream import drain
from llmrun.errors import ContextError, InternalError
from llmrun.kernels.ops import Interrupt

FakeModel = Any  # defined in fake.py

STEP_S = 0.002

Factory = Callable[[Interrupt], Generator[TokenEvent, None, Finish]]


@pytest.fixture
def real_time(fake: ModuleType, make_cache: Callable[..., KvCache], sampler: Sampler) -> FakeModel:
    """A model whose steps take 2 ms of real time; a factory of generators over it."""
    model = fake.make_model(on_forward=lambda: time.sleep(STEP_S))
    cache = make_cache(model, capacity=4000)

    def factory(n_prompt: int, max_tokens: int) -> Factory:
        return lambda stopped: generate(
            model,
            cache,
            [1] * n_prompt,
            sampler,
            stop_ids=(),
            max_tokens=max_tokens,
            interrupt=stopped,
        )

    model.cache, model.factory = cache, factory
    return model


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


def test_events_and_finish_cross_over(real_time: FakeModel) -> None:
    source = drain(real_time.factory(3, 5))
    events = [next(source) for _ in range(5)]
    with pytest.raises(StopIteration) as end:
        next(source)
    assert end.value.value is Finish.LENGTH
    assert events[0].phase is Phase.PREFILL
    assert engine_threads() == []


def test_a_slow_consumer_does_not_pause_the_engine(real_time: FakeModel) -> None:
    events = []
    for event in drain(real_time.factory(3, 21)):
        events.append(event)
        time.sleep(0.01)
    gaps_ns = [b.time_ns - a.time_ns for a, b in pairwise(events)]
    waits_ns = [gap - event.step_ns for gap, event in zip(gaps_ns, events[1:], strict=True)]
    # The consumer takes five times a step. Medians, for the machine may be busy with others.
    assert sorted(gaps_ns)[len(gaps_ns) // 2] < 0.008 * 1e9
    assert sorted(waits_ns)[len(waits_ns) // 2] < 0.001 * 1e9


def test_errors_cross_over_after_the_events_before_them(real_time: FakeModel) -> None:
    def factory(stopped: Interrupt) -> Generator[TokenEvent, None, Finish]:
        source = real_time.factory(3, 99)(stopped)
        yield next(source)
        yield next(source)
        raise InternalError("not finite")

    source = drain(factory)
    assert [next(source).position, next(source).position] == [3, 4]
    with pytest.raises(InternalError, match="not finite"):
        next(source)
    with pytest.raises(ContextError):
        next(drain(real_time.factory(5000, 1)))
    assert engine_threads() == []


def test_leaving_stops_decode_within_a_step(real_time: FakeModel) -> None:
    with closing(drain(real_time.factory(3, 3000))) as events:
        seen = [next(events) for _ in range(3)]
        computed = len(real_time.calls)
    assert engine_threads() == []
    assert len(real_time.calls) <= computed + 2  # one running, one in between these lines
    assert real_time.cache.length(0) >= 3 + len(seen) - 1
    held = real_time.cache.ids(0)
    assert held[3 : 3 + len(seen) - 1] == tuple(e.token_id for e in seen[:-1])


def test_leaving_stops_prefill_between_chunks(real_time: FakeModel) -> None:
    source = drain(real_time.factory(3000, 5))  # 750 chunks of 2 ms
    main = threading.get_ident()
    threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(source)
    assert engine_threads() == []
    assert 0 < len(real_time.calls) < 700
    assert real_time.cache.length(0) == 4 * len(real_time.calls)


def test_keyboard_interrupt_in_the_consumer_stops_the_engine(real_time: FakeModel) -> None:
    def consume() -> None:
        with closing(drain(real_time.factory(3, 3000))) as events:
            next(events)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert engine_threads() == []
    assert len(real_time.calls) < 100


def test_never_started_is_never_run(real_time: FakeModel) -> None:
    drain(real_time.factory(3, 5)).close()
    assert real_time.calls == []
