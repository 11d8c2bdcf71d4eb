from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.measure.ceilings import Ceilings
from llmrun.measure.roofline import (
    Bound,
    Work,
    decode_work,
    judge,
    model_flops,
    prefill_work,
    step_floor_ns,
)
from llmrun.measure.statistics import Gap, RequestStats, TtftParts

FakeModel = Any  # defined in fake.py

MS = 1_000_000


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("computed", "cached"), [(1, 0), (5, 0), (1, 9), (6, 2), (4, 50)])
def test_flops_equal_the_sum_over_tokens(
    fake: ModuleType, window: int | None, computed: int, cached: int
) -> None:
    model = fake.make_model(windows=(None, window))
    attended = 0
    for limit in (None, window):
        for j in range(1, computed + 1):
            attended += cached + j if limit is None else min(cached + j, limit)
    expected = 2 * 1_000_000 * computed + 2 * 100 * 8 * 1 + 4 * 4 * 2 * attended
    assert model_flops(model, computed, cached) == expected


def test_decode_work_reads_weights_and_cache_of_undisturbed_steps(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    cache = make_cache(model)
    gaps = [Gap(10 * MS, 0, 7), Gap(10 * MS, 10 * MS, 8), Gap(12 * MS, 0, 9)]
    units = decode_work(model, cache, gaps)
    assert [(u.weight_bytes, u.kv_bytes, u.time_ns) for u in units] == [
        (2_000_000, 7 * cache.bytes_per_token, 10 * MS),
        (2_000_000, 9 * cache.bytes_per_token, 12 * MS),
    ]
    assert units[0].flops == model_flops(model, 1, 6)


def test_prefill_work_reads_the_weights_once_per_chunk(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    cache = make_cache(model)
    parts = TtftParts(0, 0, 0, prefill_ns=9 * MS, sample_ns=0)
    request = RequestStats(9 * MS, parts, 11, 2, 1, (), None)  # 9 ids in chunks of 4
    work = prefill_work(model, cache, request)
    assert work.weight_bytes == 3 * 2_000_000
    assert work.kv_bytes == (6 + 10 + 11) * cache.bytes_per_token
    assert work.flops == model_flops(model, 9, 2)
    assert work.time_ns == 9 * MS


@pytest.mark.parametrize(
    ("weight_bytes", "kv_bytes", "flops", "bound", "mbu", "mfu"),
    [
        (6_000_000, 2_000_000, 1_000_000_000, Bound.MEMORY, 0.8, 0.1),
        (1_000_000, 0, 9_000_000_000, Bound.COMPUTE, 0.1, 0.9),
        (1_000_000, 1_000_000, 3_000_000_000, Bound.OVERHEAD, 0.2, 0.3),
        (5_000_000, 0, 0, Bound.MEMORY, 0.5, 0.0),
        (4_999_000, 0, 0, Bound.OVERHEAD, 0.4999, 0.0),
    ],
)
def test_verdict_names_the_limit_that_explains_the_time(
    model: FakeModel,
    weight_bytes: int,
    kv_bytes: int,
    flops: int,
    bound: Bound,
    mbu: float,
    mfu: float,
) -> None:
    # 10 ms at 1 GB/s and 1 TFLOP/s: room for 10 MB or 10 GFLOP
    unit = Work(weight_bytes, kv_bytes, flops, 10 * MS)
    verdict = judge([unit, unit], Ceilings(model.backend))
    assert verdict is not None
    assert verdict.bound is bound
    assert verdict.mbu == pytest.approx(mbu)
    assert verdict.mfu == pytest.approx(mfu)
    assert verdict.weight_share == pytest.approx(weight_bytes / (weight_bytes + kv_bytes))
    assert verdict.measured_ms == pytest.approx(10)
    assert verdict.lost_ms == pytest.approx(10 - 10 * max(mbu, mfu))


def test_no_work_no_verdict(model: FakeModel) -> None:
    assert judge([], Ceilings(model.backend)) is None


def test_step_floor_is_all_bytes_at_the_bandwidth(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    cache = make_cache(model)
    floor_ns = step_floor_ns(model, cache, Ceilings(model.backend))
    assert floor_ns(5) == pytest.approx(2_000_000 + 5 * cache.bytes_per_token)


def test_ceilings_are_measured_once_and_only_when_asked(model: FakeModel) -> None:
    asked: list[str] = []

    class Device:
        def measure_bandwidth(self) -> float:
            asked.append("bandwidth")
            return 1.0

        def measure_flops(self) -> float:
            asked.append("flops")
            return 2.0

    ceilings = Ceilings(Device())
    assert asked == []
    assert [ceilings.bandwidth_bytes_per_s, ceilings.bandwidth_bytes_per_s] == [1.0, 1.0]
    assert asked == ["bandwidth"]
    assert [ceilings.flops_per_s, ceilings.flops_per_s] == [2.0, 2.0]
    assert asked == ["bandwidth", "flops"]


def test_a_ceiling_is_raised_by_a_better_measurement_and_never_lowered() -> None:
    class Device:
        rates = iter([3.0, 30.0, 5.0, 50.0, 4.0, 40.0])

        def measure_bandwidth(self) -> float:
            return next(self.rates)

        measure_flops = measure_bandwidth

    ceilings = Ceilings(Device())
    assert (ceilings.bandwidth_bytes_per_s, ceilings.flops_per_s) == (3.0, 30.0)
    for _ in range(2):
        ceilings.measure_again()
        assert (ceilings.bandwidth_bytes_per_s, ceilings.flops_per_s) == (5.0, 50.0)
