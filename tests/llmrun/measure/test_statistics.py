from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.engine.events import Finish, Phase, PrefillParts, TokenEvent
from llmrun.engine.generate import generate
from llmrun.engine.phases import prefill
from llmrun.engine.sampler import Sampler
from llmrun.measure.statistics import Gap, mean, percentile, sd, summarize

FakeModel = Any  # defined in fake.py

MS = 1_000_000


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        # nearest rank by hand: the ceil(p n / 100)-th smallest
        ([15, 20, 35, 40, 50], 5, 15),
        ([15, 20, 35, 40, 50], 30, 20),
        ([15, 20, 35, 40, 50], 40, 20),
        ([15, 20, 35, 40, 50], 50, 35),
        ([15, 20, 35, 40, 50], 100, 50),
        ([3, 1, 2], 50, 2),
        ([4, 1, 3, 2], 50, 2),
        ([7], 50, 7),
        (range(1, 21), 95, 19),
        (range(1, 22), 95, 20),
        (range(1, 101), 95, 95),
        (range(1, 101), 99, 99),
        (range(1, 202), 99, 199),
        (range(1, 101), 7, 7),  # 0.07 * 100 is 7.000000000000001 in floats
    ],
)
def test_percentiles_are_nearest_rank(values: list[float], percent: int, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_too_few_values_have_no_percentile() -> None:
    assert percentile(range(19), 95) is None
    assert percentile(range(20), 95) is not None
    assert percentile(range(99), 99) is None
    assert percentile(range(100), 99) is not None
    assert percentile([], 50) is None


def test_mean_and_sample_deviation() -> None:
    values = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]
    assert mean(values) == 5.0
    assert sd(values) == pytest.approx((32 / 7) ** 0.5)
    assert mean([]) is None
    assert sd([1.0]) is None


def test_known_delays_come_out_exactly(
    model: FakeModel, make_cache: Callable[..., KvCache], sampler: Sampler
) -> None:
    clock = model.backend.clock
    cache = make_cache(model)
    prefill(model, cache, [1, 2])
    model.backend.synchronize()
    t_submit_ns = clock()
    clock.advance(3 * MS)  # tokenizing
    tokenized_ns = clock()
    clock.advance(1 * MS)  # a thread starts
    source = generate(
        model, cache, [1, 2, 3, 4, 5], sampler, stop_ids=(), max_tokens=11, clock=clock
    )
    stats = summarize(list(source), t_submit_ns=t_submit_ns, tokenize_ns=tokenized_ns - t_submit_ns)
    parts = stats.parts
    # 3 ids computed at 1 ms, 2 ms per pick, 10 ms per step
    assert (parts.tokenize_ns, parts.handover_ns, parts.lookup_ns) == (3 * MS, 1 * MS, 0)
    assert (parts.prefill_ns, parts.sample_ns) == (3 * MS, 2 * MS)
    assert stats.ttft_ns == 9 * MS == sum(vars(parts).values())
    assert stats.itl_ns == (12 * MS,) * 10
    assert stats.tpot_ns == 12 * MS
    assert stats.decode_tokens_per_s == pytest.approx(1000 / 12)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.computed_tokens) == (5, 2, 3)
    assert stats.prefill_tokens_per_s == pytest.approx(1000)
    assert stats.generated_tokens == 11
    assert stats.wait_share == 0
    assert stats.finish is Finish.LENGTH


def test_a_slow_consumer_shows_up_as_wait_not_as_steps(
    model: FakeModel, make_cache: Callable[..., KvCache], sampler: Sampler
) -> None:
    clock = model.backend.clock
    events = []
    for event in generate(
        model, make_cache(model), [1, 2], sampler, stop_ids=(), max_tokens=5, clock=clock
    ):
        events.append(event)
        clock.advance(50 * MS)
    stats = summarize(events, t_submit_ns=0)
    assert [gap.wait_ns for gap in stats.gaps] == [50 * MS] * 4
    assert [gap.step_ns for gap in stats.gaps] == [12 * MS] * 4
    assert stats.wait_share == pytest.approx(50 / 62)
    assert not any(gap.undisturbed for gap in stats.gaps)


def test_r123_the_end_is_the_last_id_whatever_comes_late(
    model: FakeModel, make_cache: Callable[..., KvCache], sampler: Sampler
) -> None:
    clock = model.backend.clock
    events = list(
        generate(model, make_cache(model), [1], sampler, stop_ids=(), max_tokens=3, clock=clock)
    )
    clock.advance(10_000 * MS)
    assert summarize(events, t_submit_ns=0).decode_ns == 24 * MS


def test_r124_first_token_is_the_first_id_even_a_stop(
    fake: ModuleType, make_cache: Callable[..., KvCache], sampler: Sampler
) -> None:
    model = fake.make_model(script=[2])
    t_submit_ns = model.backend.clock()
    events = list(
        generate(
            model,
            make_cache(model),
            [1, 1, 1],
            sampler,
            stop_ids={2},
            max_tokens=None,
            clock=model.backend.clock,
        )
    )
    stats = summarize(events, t_submit_ns=t_submit_ns)
    assert stats.ttft_ns == 5 * MS
    assert stats.generated_tokens == 1
    assert stats.finish is Finish.STOP
    assert stats.tpot_ns is None
    assert stats.decode_tokens_per_s is None
    assert stats.itl_ns == ()


def test_r125_ids_are_counted_when_several_share_a_stamp() -> None:
    parts = PrefillParts(0, 0, 5 * MS, 1 * MS, prompt_tokens=4, cached_tokens=4 - 1)
    times_ms = [6, 16, 16, 16, 26]
    events = [
        TokenEvent(
            token_id=i,
            time_ns=time_ms * MS,
            step_ns=(time_ms - times_ms[max(i - 1, 0)]) * MS,
            phase=Phase.DECODE,
            logprob=0.0,
            position=4 + i,
            parts=parts if i == 0 else None,
        )
        for i, time_ms in enumerate(times_ms)
    ]
    stats = summarize(events, t_submit_ns=0)
    assert stats.generated_tokens == 5
    assert stats.itl_ns == (10 * MS, 0, 0, 10 * MS)
    assert stats.decode_tokens_per_s == pytest.approx(4 / 0.020)
    assert stats.finish is None


def test_one_percent_of_wait_is_the_limit() -> None:
    assert Gap(step_ns=99, wait_ns=1, depth_tokens=1).undisturbed
    assert not Gap(step_ns=98, wait_ns=2, depth_tokens=1).undisturbed


def test_a_request_without_ids_has_no_latencies() -> None:
    with pytest.raises(ValueError, match="first event"):
        summarize([], t_submit_ns=0)
