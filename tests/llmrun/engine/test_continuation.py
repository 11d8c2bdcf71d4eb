"""Answers whose ids are fed back on the device: the same answers, one step ahead."""

from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.engine.events import Finish, Phase, TokenEvent
from llmrun.engine.generate import generate
from llmrun.engine.phases import prefill
from llmrun.engine.sampler import Sampler
from llmrun.errors import InternalError
from llmrun.kernels.ops import Sampling

FakeModel = Any  # defined in fake.py

MakeCache = Callable[..., KvCache]
MS = 1_000_000


@pytest.fixture
def chained(fake: ModuleType) -> FakeModel:
    return fake.make_model(chains=True)


@pytest.fixture
def both(fake: ModuleType) -> Callable[..., list[FakeModel]]:
    """The same model twice: through the host, and chained."""

    def make(**changes: Any) -> list[FakeModel]:
        copies = [
            {key: list(v) if isinstance(v, list) else v for key, v in changes.items()}
            for _ in range(2)
        ]
        return [fake.make_model(chains=bool(n), **copy) for n, copy in enumerate(copies)]

    return make


def run(
    model: FakeModel, cache: KvCache, prompt: list[int], sampler: Sampler, **options: Any
) -> tuple[list[TokenEvent], Finish]:
    """All events and the return value."""
    options = {"stop_ids": frozenset(), "max_tokens": 6, "clock": model.backend.clock, **options}
    source = generate(model, cache, prompt, sampler, **options)
    events: list[TokenEvent] = []
    while True:
        try:
            events.append(next(source))
        except StopIteration as end:
            return events, end.value


def said(events: list[TokenEvent]) -> list[tuple[int, int, Phase, Finish | None]]:
    return [(e.token_id, e.position, e.phase, e.finish) for e in events]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 6},
        {"max_tokens": None},
        {"max_tokens": None, "slot": 1},
        {"max_tokens": 99, "stop_ids": frozenset(range(0, 100, 7))},
    ],
    ids=["one", "two", "length", "context", "slot", "stop"],
)
def test_events_finish_and_cache_are_those_of_the_host_loop(
    both: Callable[..., list[FakeModel]],
    make_cache: MakeCache,
    sampler: Sampler,
    options: dict[str, Any],
) -> None:
    answers, caches = [], []
    for model in both():
        cache = make_cache(model, capacity=16)
        events, finish = run(model, cache, [1, 2, 3], sampler, **options)
        turn = [1, 2, 3, *(e.token_id for e in events[:-1]), 40][:16]
        more, end = run(model, cache, turn, sampler, **{**options, "max_tokens": 1})
        answers.append((said(events), finish, said(more), end))
        caches.append([cache.ids(slot) for slot in range(2)])
    assert answers[0] == answers[1]
    assert caches[0] == caches[1]


def test_requests_are_those_of_the_host_loop_but_for_the_history(
    both: Callable[..., list[FakeModel]], make_cache: MakeCache
) -> None:
    sampler = Sampler(Sampling(temperature=0.5, repeat_penalty=1.2, seed=4), vocab=90)
    host, chained = both()
    for model in (host, chained):
        events, _ = run(model, make_cache(model), [1, 2], sampler, max_tokens=5)
    plain = [replace(request, history=()) for request in host.backend.requests]
    assert [replace(request, history=()) for request in chained.backend.requests] == plain
    assert [request.draw for request in plain] == [0, 1, 2, 3, 4]
    # The chain is told what was said before it; what it says itself it sees.
    assert chained.opened[0].requests[0].history == (events[0].token_id,)


def test_one_step_is_issued_ahead_and_none_behind_the_end(
    chained: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    events, _ = run(chained, make_cache(chained), [1, 2, 3], sampler, max_tokens=6)
    (chain,) = chained.opened
    assert chain.most_unread == 2
    assert len(chained.calls) == 1 + 5  # n ids cost one prefill and n - 1 steps
    assert chain.unread == []
    assert not chain.open
    assert [event.position for event in events] == [3, 4, 5, 6, 7, 8]


def test_the_step_ahead_of_a_stop_is_dropped(
    fake: ModuleType, make_cache: MakeCache, sampler: Sampler
) -> None:
    model = fake.make_model(chains=True, script=[5, 6, 2, 7, 8])
    cache = make_cache(model)
    events, finish = run(model, cache, [1], sampler, stop_ids={2}, max_tokens=9)
    assert [event.token_id for event in events] == [5, 6, 2]
    assert finish is Finish.STOP
    assert cache.ids(0) == (1, 5, 6)  # the stop id was fed by the step that is dropped
    assert len(model.opened[0].unread) == 1
    assert not model.opened[0].open


def test_no_step_is_issued_that_the_context_has_no_room_for(
    chained: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(chained, capacity=8)
    events, finish = run(chained, cache, [1, 2, 3], sampler, max_tokens=None)
    assert len(events) == 6
    assert finish is Finish.CONTEXT
    assert max(span.position for _, spans, _ in chained.calls for span in spans) == 7


def test_a_stamp_is_taken_when_the_host_sees_the_id(
    chained: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    clock = chained.backend.clock
    events, _ = run(chained, make_cache(chained), [1, 2], sampler, max_tokens=6)
    gaps = [b.time_ns - a.time_ns for a, b in pairwise(events)]
    assert gaps == [12 * MS] * 5  # a step and its choice, not the step ahead
    assert [event.step_ns for event in events[1:]] == gaps
    assert events[0].parts is not None
    assert events[-1].time_ns == clock()


def test_interrupt_loses_no_event_and_records_no_dropped_id(
    chained: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    asked = 0

    def interrupt() -> bool:
        nonlocal asked
        asked += 1
        return asked == 6  # once: it must not be lost

    cache = make_cache(chained)
    events, finish = run(chained, cache, [1, 2], sampler, max_tokens=99, interrupt=interrupt)
    assert finish is Finish.INTERRUPTED
    assert all(event.finish is None for event in events)
    assert cache.ids(0) == (1, 2, *(event.token_id for event in events[:-1]))
    assert not chained.opened[0].open
    # Asked before the prefill's chunk, then before each step whose id is seen.
    assert len(events) == asked - 1


@pytest.mark.parametrize("n_seen", [1, 2, 4])
def test_close_leaves_a_cache_that_can_be_continued(
    fake: ModuleType, chained: FakeModel, make_cache: MakeCache, sampler: Sampler, n_seen: int
) -> None:
    cache = make_cache(chained)
    source: Generator[TokenEvent, None, Finish] = generate(
        chained, cache, [1, 2, 3], sampler, stop_ids=(), max_tokens=None,
        clock=chained.backend.clock,
    )  # fmt: skip
    ids = [next(source).token_id for _ in range(n_seen)]
    source.close()
    assert not any(chain.open for chain in chained.opened)
    assert cache.ids(0) == (1, 2, 3, *ids[:-1])
    turn = [1, 2, 3, *ids, 40, 41]
    events, _ = run(chained, cache, turn, sampler)
    fresh = fake.make_model()
    assert said(run(fresh, make_cache(fresh), turn, sampler)[0]) == said(events)


def test_r109_not_finite_is_an_error_and_nobody_builds_on_it(
    chained: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(chained)
    cache.append(1, [7])
    source = generate(
        chained, cache, [1, 2], sampler, stop_ids=(), max_tokens=9, clock=chained.backend.clock
    )
    next(source)
    next(source)
    chained.backend.pick_error = InternalError("not finite")
    with pytest.raises(InternalError):
        next(source)
    assert cache.ids(0) == ()
    assert cache.ids(1) == (7,)
    assert not chained.opened[0].open


def test_an_error_while_a_step_is_issued_leaves_the_cache_at_what_was_seen(
    chained: FakeModel, make_cache: MakeCache, sampler: Sampler
) -> None:
    cache = make_cache(chained)
    source = generate(
        chained, cache, [1, 2], sampler, stop_ids=(), max_tokens=9, clock=chained.backend.clock
    )
    ids = [next(source).token_id for _ in range(3)]

    def fail() -> None:
        raise KeyboardInterrupt

    chained.on_forward = fail
    with pytest.raises(KeyboardInterrupt):
        next(source)
    assert cache.ids(0) == (1, 2, *ids[:-1])
    assert not chained.opened[0].open


def test_answers_that_take_turns_on_one_model_stay_apart(
    both: Callable[..., list[FakeModel]], make_cache: MakeCache, sampler: Sampler
) -> None:
    answers = []
    for model in both():
        cache = make_cache(model)
        sources = [
            generate(
                model, cache, prompt, sampler, stop_ids=(), max_tokens=6, slot=slot,
                clock=model.backend.clock,
            )
            for slot, prompt in enumerate(([1, 2], [9, 8, 7]))
        ]  # fmt: skip
        events = [(said([a]), said([b])) for a, b in zip(*sources, strict=True)]
        answers.append((events, cache.ids(0), cache.ids(1)))
    assert answers[0] == answers[1]


def test_a_call_of_the_model_between_ids_ends_the_chain_not_the_answer(
    both: Callable[..., list[FakeModel]], make_cache: MakeCache, sampler: Sampler
) -> None:
    answers = []
    for model in both():
        cache = make_cache(model)
        source = generate(
            model, cache, [1, 2], sampler, stop_ids=(), max_tokens=8, clock=model.backend.clock
        )
        events = [next(source) for _ in range(4)]
        prefill(model, cache, [5, 5], slot=1)
        answers.append(said([*events, *source]))
    assert answers[0] == answers[1]
    assert len(model.opened) == 2


def test_a_model_without_chains_is_asked_once_per_answer(
    fake: ModuleType, make_cache: MakeCache, sampler: Sampler
) -> None:
    model = fake.make_model()
    asked = []
    model.chain = lambda *of: asked.append(of)
    events, _ = run(model, make_cache(model), [1, 2], sampler, max_tokens=6)
    assert len(events) == 6
    assert len(asked) == 1


def test_r089_a_chain_ends_where_its_sequence_outgrows_the_rotation(
    fake: ModuleType, make_cache: MakeCache, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limit is 8 tokens: the step that makes 9 feeds all of them again.
    answers = []
    for chains in (False, True):
        model = fake.make_model(chains=chains, max_tokens=16)
        monkeypatch.setattr(type(model.spec), "rope_limits", (8,))
        cache = make_cache(model)
        events, finish = run(model, cache, [1, 2, 3], sampler, max_tokens=12)
        answers.append((said(events), finish, cache.ids(0), cache.outgrown(0, 1)))
    assert answers[0] == answers[1]
    first, second = model.opened
    assert (first.stage, second.stage) == (0, 1)
    fed = [token_ids for token_ids, _, _ in model.calls]
    again = next(ids for ids in fed[1:] if len(ids) > 1)
    assert len(again) == 8
    assert first.issued == 5  # 3 tokens in the prompt, 8 before the limit
