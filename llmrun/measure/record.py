"""The record of a benchmark and its JSON form, ``llmrun.bench/1``.

The keys are an interface: scripts and comparisons read them. Units are in the names; a number
that was not measured, or rests on too few values, is null. Samples are kept, so that whoever reads
the record can compute anything else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from llmrun.measure.environment import Environment
from llmrun.measure.roofline import Verdict
from llmrun.measure.statistics import mean, percentile, sd

SCHEMA = "llmrun.bench/1"


@dataclass(frozen=True)
class Distribution:
    """Samples and what is said of them; a percentile is None if there are too few."""

    mean: float | None
    sd: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None
    samples: tuple[float, ...]


def distribution(samples: Sequence[float]) -> Distribution:
    """Describe the samples."""
    return Distribution(
        mean=mean(samples),
        sd=sd(samples),
        p50=percentile(samples, 50),
        p95=percentile(samples, 95),
        p99=percentile(samples, 99),
        max=max(samples, default=None),
        samples=tuple(samples),
    )


@dataclass(frozen=True)
class BenchRecord:
    """One measurement: a model, a shape, a machine. Fields are the JSON keys.

    ``prompt_tokens``, ``generated_tokens`` and ``depth_tokens`` are per request. ``mbu`` is that
    of decode, ``mfu`` that of prefill. ``peak_device_bytes`` is filled in by whoever owns the
    device (``dataclasses.replace``). ``wait_share`` is the part of the decode time lost to the
    consumer; ``warnings`` say why the numbers may not be trusted.
    """

    model: str
    revision: str | None
    scheme: str
    bits_per_weight: float
    device: str
    backend: str
    threads: int
    prompt_tokens: int
    generated_tokens: int
    depth_tokens: int
    batch: int
    repeats: int
    ttft_ms: Distribution
    itl_ms: Distribution
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    load_ms: float
    peak_host_bytes: int | None
    peak_device_bytes: int | None
    weight_bytes_per_token: int
    kv_bytes_per_token: int
    measured_bandwidth_bytes_per_s: float
    mbu: float | None
    measured_flops_per_s: float
    mfu: float | None
    prefill_verdict: Verdict | None
    decode_verdict: Verdict | None
    env: Environment
    wait_share: float
    warnings: tuple[str, ...]


def document(records: Sequence[BenchRecord]) -> dict[str, object]:
    """The whole JSON document."""
    return {"schema": SCHEMA, "results": [to_json(record) for record in records]}


def to_json(record: BenchRecord) -> dict[str, object]:
    """One result of the document."""
    result: dict[str, object] = {
        field.name: getattr(record, field.name)
        for field in fields(record)
        if field.name not in ("prefill_verdict", "decode_verdict")
    }
    result["ttft_ms"] = _pick(record.ttft_ms, ("mean", "sd", "p50", "p95", "samples"))
    result["itl_ms"] = _pick(record.itl_ms, ("mean", "sd", "p50", "p95", "p99", "max", "samples"))
    result["verdict"] = {
        "prefill": _verdict(record.prefill_verdict),
        "decode": _verdict(record.decode_verdict),
    }
    result["ttft_from"] = "ids"
    return result


def _pick(values: Distribution, keys: Sequence[str]) -> dict[str, object]:
    return {key: getattr(values, key) for key in keys}


def _verdict(verdict: Verdict | None) -> dict[str, object] | None:
    if verdict is None:
        return None
    names = ("mbu", "mfu", "weight_share", "measured_ms", "roofline_ms", "lost_ms")
    return {"bound": verdict.bound.value, **{name: getattr(verdict, name) for name in names}}
