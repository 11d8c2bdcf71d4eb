import random
from collections.abc import Callable
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.engine.generate import generate
from llmrun.engine.sampler import Sampler
from llmrun.measure.live import Meter
from llmrun.measure.statistics import percentile, summarize

FakeModel = Any  # defined in fake.py

MS = 1_000_000


def test_readings_equal_the_statistics_of_the_events_so_far(
    model: FakeModel, make_cache: Callable[..., KvCache], sampler: Sampler
) -> None:
    clock, dice = model.backend.clock, random.Random(1)
    submitted_ns = clock()
    meter = Meter(submitted_ns, context_limit=64)
    events = []
    for event in generate(
        model, make_cache(model, 64), [1, 2, 3], sampler, stop_ids=(), max_tokens=40, clock=clock
    ):
        events.append(event)
        reading = meter.push(event)
        stats = summarize(events, t_submit_ns=submitted_ns)
        assert reading.ttft_ms == stats.ttft_ns / 1e6
        assert reading.generated_tokens == len(events)
        assert (reading.context_tokens, reading.context_limit) == (event.position, 64)
        if len(events) == 1:
            assert reading.itl_last_ms is None
            assert reading.itl_p50_ms is None
            assert reading.tokens_per_s is None
        else:
            p50_ns = percentile(stats.itl_ns, 50)
            assert p50_ns is not None
            assert reading.itl_last_ms == stats.itl_ns[-1] / 1e6
            assert reading.itl_p50_ms == p50_ns / 1e6
            assert reading.tokens_per_s == pytest.approx(stats.decode_tokens_per_s)
        assert reading.mbu is None
        clock.advance(dice.randrange(30 * MS))
    assert reading.context_tokens <= reading.context_limit


def test_mbu_is_floor_over_step_time_without_disturbed_steps(
    model: FakeModel, make_cache: Callable[..., KvCache], sampler: Sampler
) -> None:
    clock = model.backend.clock
    meter = Meter(clock(), 64, step_floor_ns=lambda depth: depth * MS)
    mbu: list[float | None] = []
    for n, event in enumerate(
        generate(model, make_cache(model), [1, 2], sampler, stop_ids=(), max_tokens=4, clock=clock)
    ):
        mbu.append(meter.push(event).mbu)
        clock.advance(50 * MS if n == 1 else 0)
    # steps of 12 ms at depths 3, 4, 5; the one at depth 4 came after a wait
    assert mbu == [None, 3 / 12, 3 / 12, (3 + 5) / 24]
