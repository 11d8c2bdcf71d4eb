from collections.abc import Callable, Generator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.engine.events import Finish, Phase, TokenEvent
from llmrun.engine.generate import generate
from llmrun.engine.phases import decode_step, prefill
from llmrun.engine.sampler import Sampler
from llmrun.errors import ContextError, InternalError, ModelFileError, UsageError
from llmrun.kernels.ops import Span

FakeModel = Any  # defined in fake.py

MakeCache = Callable[..., KvCache]
MS = 1_000_000


def run(
    model: FakeModel, cache: KvCache, prompt: list[int], sampler: Sampler, **options: object
) -> tuple[list[TokenEvent], Finish]:
    """All events and the return value."""
    options = {"stop_ids": frozenset(), "max_tokens": 4, "clock": model.backend.clock, **options}
    source = generate(model, cache, prompt, sampler, **options)
    events: list[TokenEvent] = []
    while True:
        try:
            events.append(next(source))
        except StopIteration as end:
            return events, end.value


def ids(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


# --- phases -----------------------------------------------------------------------------------


def test_prefill_chunks_cover_the_prompt_and_only_the_last_wants_logits(
    model: FakeModel, make_cache: MakeCache
) -> None:
    cache = make_cache(model)
    logits = prefill(model, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], slot=1)
    assert model.calls == [
        ([1, 2, 3, 4], [Span(1, 0, 4, 0)], []),
        ([5, 6, 7, 8], [Span(1, 0, 4, 4)], []),
        ([9], [Span(1, 0, 1, 8)], [0]),
    ]
    assert logits == [model.next_id(1, 8)]
    assert cache.ids(1) == tuple(range(1, 10))


def test_progress_tells_what_is_done_not_what_is_queued(
    model: FakeModel, make_cache: MakeCache
) -> None:
    seen: list[tuple[int, int, int]] = []
    start_ns = model.backend.clock()

    def note(done: int, total: int) -> None:
        seen.append((done, total, (model.backend.clock() - start_ns) // MS))

    prefill(model, make_cache(model), [1, 2, 3, 4, 5, 6], on_progress=note)
    assert seen == [(0, 6, 0), (4, 6, 4), (6, 6, 6)]


def test_interrupted_prefill_keeps_the_chunks_it_fed(
    model: FakeModel, make_cache: MakeCache
) -> None:
    cache = make_cache(model)
    assert prefill(model, cache, list(range(10)), interrupt=lambda: len(model.calls) == 2) is None
    assert cache.ids(0) == tuple(range(8))


def test_one_decode_step_serves_several_slots(
    fake: ModuleType, model: FakeModel, make_cache: MakeCache
) -> None:
    cache = make_cache(model)
    prefill(model, cache, [1, 2, 3], slot=0)
    prefill(model, cache, [4, 5], slot=1)
    logits = decode_step(model, cache, [1, 0], [8, 9])
    assert model.calls[-1] == ([8, 9], [Span(1, 0, 1, 2), Span(0, 1, 1, 3)], [0, 1])
    assert [cache.ids(0), cache.ids(1)] == [(1, 2, 3, 9), (4, 5, 8)]

    alone = fake.make_model()
    other = make_cache(alone)
    prefill(alone, other, [1, 2, 3])
    assert decode_step(alone, other, [0], [9]) == [logits[1]]


def test_r055_a_step_into_a_full_slot_fails_before_compute(
    model: FakeModel, make_cache: MakeCache
) -> None:
    cache = make_cache(model, capacity=4)
    prefill(model, cache, [1, 2, 3, 4])
    before = len(model.calls)
    with pytest.raises(ContextError):
        decode_step(model, cache, [1, 0], [5, 5])
    assert len(model.calls) == before
    assert cache.ids(1) == ()


# --- stamps -----------------------------------------------------------------------------------


def test_r121_first_event_splits_the_time_and_waits_for_the_device(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    start_ns = model.backend.clock()
    events, _ = run(model, make_cache(model), [1, 2, 3, 4, 5, 6], sampler)
    parts = events[0].parts
    assert parts is not None
    assert parts.start_ns == start_ns
    # six ids: a chunk of four (1 ms each), a chunk of two; only then 2 ms of picking
    assert (parts.lookup_ns, parts.prefill_ns, parts.sample_ns) == (0, 6 * MS, 2 * MS)
    total = parts.start_ns + parts.lookup_ns + parts.prefill_ns + parts.sample_ns
    assert total == events[0].time_ns
    assert events[0].step_ns == 8 * MS
    assert events[0].phase is Phase.PREFILL
    assert all(event.parts is None and event.phase is Phase.DECODE for event in events[1:])


def test_a_slow_consumer_is_wait_and_leaves_steps_unchanged(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    clock = model.backend.clock
    events = []
    source = generate(
        model, make_cache(model), [1, 2], sampler, stop_ids=(), max_tokens=5, clock=clock
    )
    for event in source:
        events.append(event)
        clock.advance(50 * MS)
    assert [event.step_ns for event in events[1:]] == [12 * MS] * 4
    gaps = [b.time_ns - a.time_ns for a, b in pairwise(events)]
    assert gaps == [62 * MS] * 4


def test_r125_every_id_is_one_event_at_its_position(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    events, _ = run(model, make_cache(model), [1, 2, 3], sampler, max_tokens=6)
    assert [event.position for event in events] == [3, 4, 5, 6, 7, 8]
    assert len(model.calls) == 1 + 5  # n ids cost one prefill and n - 1 steps
    assert [request.draw for request in model.backend.requests] == [0, 1, 2, 3, 4, 5]


# --- ends -------------------------------------------------------------------------------------


def test_stop_id_is_the_last_event(
    fake: ModuleType, make_cache: MakeCache, sampler: Sampler
) -> None:
    model = fake.make_model(script=[5, 6, 2, 7])
    events, finish = run(model, make_cache(model), [1], sampler, stop_ids={2, 3}, max_tokens=9)
    assert ids(events) == [5, 6, 2]
    assert [event.finish for event in events] == [None, None, Finish.STOP]
    assert finish is Finish.STOP


def test_r049_without_stop_ids_it_makes_exactly_the_wanted_ids(
    fake: ModuleType, make_cache: MakeCache, sampler: Sampler
) -> None:
    model = fake.make_model(script=[2, 3, 2, 3])
    events, finish = run(model, make_cache(model), [1], sampler, stop_ids=set(), max_tokens=4)
    assert ids(events) == [2, 3, 2, 3]
    assert finish is events[-1].finish is Finish.LENGTH


def test_r051_the_edge_of_the_context(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    for n_prompt in (15, 16):
        events, finish = run(
            model, make_cache(model, capacity=16), [1] * n_prompt, sampler, max_tokens=None
        )
        # each id but the last is fed, so capacity - prompt + 1 ids come out
        assert len(events) == 16 - n_prompt + 1
        assert finish is events[-1].finish is Finish.CONTEXT
    calls = len(model.calls)
    with pytest.raises(ContextError):
        run(model, make_cache(model, capacity=16), [1] * 17, sampler)
    assert len(model.calls) == calls  # nothing was computed


def test_last_allowed_id_that_is_a_stop_id_is_a_stop(
    fake: ModuleType, make_cache: MakeCache, sampler: Sampler
) -> None:
    model = fake.make_model(script=[5, 2])
    _, finish = run(model, make_cache(model), [1], sampler, stop_ids={2}, max_tokens=2)
    assert finish is Finish.STOP


def test_bad_requests_fail_before_compute(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(model)
    with pytest.raises(UsageError):
        run(model, cache, [], sampler)
    with pytest.raises(UsageError):
        run(model, cache, [1], sampler, max_tokens=0)
    for wrong in (-1, 100):
        with pytest.raises(ModelFileError, match=str(wrong)):
            run(model, cache, [1, wrong, 2], sampler)
    assert model.calls == []


def test_interrupt_in_prefill_returns_without_an_event(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(model)
    events, finish = run(
        model, cache, list(range(9)), sampler, interrupt=lambda: len(model.calls) >= 1
    )
    assert events == []
    assert finish is Finish.INTERRUPTED
    assert cache.ids(0) == (0, 1, 2, 3)


def test_interrupt_in_decode_loses_no_event(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(model)
    events, finish = run(
        model, cache, [1, 2], sampler, max_tokens=99, interrupt=lambda: len(model.calls) >= 3
    )
    assert len(model.calls) == len(events) == 3  # each id that was computed was reported
    assert finish is Finish.INTERRUPTED
    assert all(event.finish is None for event in events)
    assert cache.ids(0) == (1, 2, *ids(events[:-1]))


def test_close_leaves_a_cache_that_can_be_continued(
    fake: ModuleType, model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(model)
    source: Generator[TokenEvent, None, Finish] = generate(
        model, cache, [1, 2, 3], sampler, stop_ids=(), max_tokens=None, clock=model.backend.clock
    )
    said = [next(source).token_id for _ in range(3)]
    source.close()
    turn = [1, 2, 3, *said, 40, 41]
    events, _ = run(model, cache, turn, sampler)
    assert events[0].parts is not None
    assert events[0].parts.cached_tokens == 3 + 2  # the last id said had not been fed
    assert events[0].parts.prompt_tokens == 8

    fresh = fake.make_model()
    assert ids(run(fresh, make_cache(fresh), turn, sampler)[0]) == ids(events)


def test_r118_the_same_prompt_gives_the_same_answer_cached_or_not(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(model)
    first = ids(run(model, cache, [1, 2, 3, 4, 5], sampler)[0])
    run(model, cache, [1, 2, 9], sampler)
    assert ids(run(model, cache, [1, 2, 3, 4, 5], sampler)[0]) == first
    assert ids(run(model, cache, [1, 2, 3, 4, 5], sampler)[0]) == first


def test_r109_not_finite_is_an_error_and_nobody_builds_on_it(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(model)
    cache.append(1, [7])
    source = generate(
        model, cache, [1, 2], sampler, stop_ids=(), max_tokens=9, clock=model.backend.clock
    )
    next(source)
    model.backend.pick_error = InternalError("not finite")
    with pytest.raises(InternalError):
        next(source)
    assert cache.ids(0) == ()
    assert cache.ids(1) == (7,)


def test_an_error_inside_a_step_leaves_the_cache_at_what_was_fed(
    model: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(model)
    source = generate(
        model, cache, [1, 2], sampler, stop_ids=(), max_tokens=9, clock=model.backend.clock
    )
    first = next(source).token_id
    next(source)

    def fail() -> None:
        raise KeyboardInterrupt

    model.on_forward = fail
    with pytest.raises(KeyboardInterrupt):
        next(source)
    assert cache.ids(0) == (1, 2, first)
