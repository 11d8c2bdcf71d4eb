import json
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.errors import UsageError
from llmrun.measure.bench import Shape, Subject, bench, synthetic_ids
from llmrun.measure.ceilings import Ceilings
from llmrun.measure.record import BenchRecord, document

FakeModel = Any  # defined in fake.py

MS = 1_000_000

KEYS = {
    "model",
    "revision",
    "scheme",
    "bits_per_weight",
    "device",
    "backend",
    "threads",
    "prompt_tokens",
    "generated_tokens",
    "depth_tokens",
    "batch",
    "repeats",
    "ttft_ms",
    "itl_ms",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "load_ms",
    "peak_host_bytes",
    "peak_device_bytes",
    "weight_bytes_per_token",
    "kv_bytes_per_token",
    "measured_bandwidth_bytes_per_s",
    "mbu",
    "measured_flops_per_s",
    "mfu",
    "verdict",
    "env",
    "ttft_from",
    "wait_share",
    "warnings",
}

SUBJECT = Subject("tiny", "abc", "int4", 4.5, load_ms=12.0, vocab=90, special_ids={0, 1, 2})


def measure(
    model: FakeModel, make_cache: Callable[..., KvCache], shape: Shape, seed: int = 0
) -> BenchRecord:
    return bench(
        model,
        make_cache(model),
        SUBJECT,
        shape,
        Ceilings(model.backend),
        {"cpu": "fake"},
        seed=seed,
        clock=model.backend.clock,
    )


def test_record_of_known_delays(model: FakeModel, make_cache: Callable[..., KvCache]) -> None:
    record = measure(model, make_cache, Shape(8, 5, repeats=6))
    assert (record.prompt_tokens, record.generated_tokens, record.repeats) == (8, 5, 6)
    assert record.ttft_ms.samples == (10.0,) * 6  # 8 ids at 1 ms and a pick of 2 ms
    assert record.itl_ms.samples == (12.0,) * 24
    assert (record.itl_ms.mean, record.itl_ms.sd, record.itl_ms.max) == (12.0, 0.0, 12.0)
    assert record.itl_ms.p95 == 12.0  # 24 values are enough
    assert record.itl_ms.p99 is None
    assert record.ttft_ms.p95 is None
    assert record.prefill_tokens_per_s == pytest.approx(1000)
    assert record.decode_tokens_per_s == pytest.approx(1000 / 12)
    assert record.wait_share == 0
    assert record.warnings == ()
    kv_bytes = sum(range(9, 13)) / 4 * record.kv_bytes_per_token
    assert record.mbu == pytest.approx((2_000_000 + kv_bytes) / 1e9 / 0.012)


def test_json_has_every_key_and_survives_a_round_trip(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    record = measure(model, make_cache, Shape(4, 3, repeats=2))
    text = json.dumps(document([record, replace(record, peak_device_bytes=5)]), allow_nan=False)
    read = json.loads(text)
    assert read["schema"] == "llmrun.bench/1"
    first, second = read["results"]
    assert set(first) == set(second) == KEYS
    assert list(first["ttft_ms"]) == ["mean", "sd", "p50", "p95", "samples"]
    assert list(first["itl_ms"]) == ["mean", "sd", "p50", "p95", "p99", "max", "samples"]
    assert set(first["verdict"]) == {"prefill", "decode"}
    assert first["verdict"]["decode"]["bound"] == "overhead-bound"
    assert first["verdict"]["decode"]["lost_ms"] > 0
    assert (first["batch"], first["depth_tokens"], first["ttft_from"]) == (1, 0, "ids")
    assert first["peak_device_bytes"] is None
    assert second["peak_device_bytes"] == 5
    assert first["weight_bytes_per_token"] == 2_000_000
    assert first["env"] == {"cpu": "fake"}


def test_the_warm_up_is_run_and_not_counted(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    def slow_first() -> None:
        model.backend.clock.advance(500 * MS if len(model.calls) == 1 else 0)

    model.on_forward = slow_first
    record = measure(model, make_cache, Shape(4, 2, repeats=3))
    assert record.ttft_ms.max == 6.0
    assert len(model.calls) == 4 * 2


def test_every_repeat_computes_the_same_prompt_in_full(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    measure(model, make_cache, Shape(4, 2, repeats=2))
    assert model.calls[0] == model.calls[2] == model.calls[4]
    assert model.calls[0][1][0].position == 0


def test_depth_is_in_the_cache_and_outside_the_time(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    record = measure(model, make_cache, Shape(4, 2, depth_tokens=8, repeats=1))
    assert record.depth_tokens == 8
    assert record.ttft_ms.samples == (6.0,)
    assert record.prefill_tokens_per_s == pytest.approx(1000)
    assert [span.position for _, (span,), _ in model.calls[:4]] == [0, 4, 8, 12]


def test_r049_stop_ids_do_not_shorten_a_benchmark(
    fake: ModuleType, make_cache: Callable[..., KvCache]
) -> None:
    model = fake.make_model(script=[2] * 100)
    assert measure(model, make_cache, Shape(3, 7, repeats=1)).generated_tokens == 7


def test_synthetic_ids_are_seeded_and_ordinary() -> None:
    ids = synthetic_ids(SUBJECT, 2000, seed=3)
    assert ids == synthetic_ids(SUBJECT, 2000, seed=3)
    assert ids != synthetic_ids(SUBJECT, 2000, seed=4)
    assert set(ids) == set(range(3, 90))


def test_waits_above_one_percent_are_flagged(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    clock = model.backend.clock

    class Restless:
        """Between two reads without work another program has the processor for 1 ms."""

        calls = 0

        def __call__(self) -> int:
            if len(model.calls) == self.calls:
                clock.advance(MS)
            self.calls = len(model.calls)
            return clock()

    record = bench(
        model,
        make_cache(model),
        SUBJECT,
        Shape(4, 5, repeats=1),
        Ceilings(model.backend),
        {},
        clock=Restless(),
    )
    assert record.wait_share > 0.01
    assert any("waited" in warning for warning in record.warnings)


def test_a_first_repeat_that_still_warms_up_is_flagged(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    def slow_second_request() -> None:
        model.backend.clock.advance(500 * MS if len(model.calls) == 3 else 0)

    model.on_forward = slow_second_request
    record = measure(model, make_cache, Shape(4, 2, repeats=3))
    assert any("warm-up" in warning for warning in record.warnings)


def test_one_output_token_has_no_decode(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    record = measure(model, make_cache, Shape(4, 1, repeats=2))
    assert record.decode_tokens_per_s is None
    assert record.mbu is None
    assert record.itl_ms.samples == ()
    (result,) = json.loads(json.dumps(document([record])))["results"]
    assert result["itl_ms"]["max"] is None
    assert result["verdict"]["decode"] is None


@pytest.mark.parametrize(
    "shape",
    [
        Shape(0, 1),
        Shape(1, 0),
        Shape(1, 1, depth_tokens=-1),
        Shape(1, 1, repeats=0),
        Shape(20, 8, depth_tokens=5),
    ],
)
def test_a_shape_that_asks_for_nothing_or_more_than_the_cache_holds_is_refused(
    model: FakeModel, make_cache: Callable[..., KvCache], shape: Shape
) -> None:
    with pytest.raises(UsageError):
        measure(model, make_cache, shape)
    assert model.calls == []
