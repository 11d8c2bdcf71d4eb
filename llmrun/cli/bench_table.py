"""A bench record as a person reads it: one measure a line, in a table or in Markdown."""

from llmrun.cli.units import ms, rate, size
from llmrun.measure.record import BenchRecord, Distribution
from llmrun.measure.roofline import Verdict
from llmrun.measure.statistics import MAX_WAIT_SHARE

HEAD = ("measure", "value", "detail")
Row = tuple[str, str, str]


def bench_table(record: BenchRecord) -> str:
    """Aligned columns; plain text, so that it pipes."""
    rows = [HEAD, *_rows(record)]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    return "\n".join([title(record), *lines, environment_line(record)])


def markdown(record: BenchRecord) -> str:
    """A table for a README."""
    lines = [f"| {' | '.join(row)} |" for row in (HEAD, ("---",) * 3, *_rows(record))]
    return "\n".join([title(record), "", *lines, "", environment_line(record)])


def title(record: BenchRecord) -> str:
    """What was measured."""
    return (
        f"{record.model} · {record.scheme} ({record.bits_per_weight:.2f} bits per weight) · "
        f"{record.device} ({record.backend}, {record.threads} threads) · prompt "
        f"{record.prompt_tokens:,} + {record.generated_tokens:,} generated, "
        f"{record.repeats} repeats"
    )


def environment_line(record: BenchRecord) -> str:
    """Where it was measured."""
    env = record.env
    memory = env.get("memory_bytes")
    versions = [f"{key[:-8]} {value}" for key, value in env.items() if key.endswith("_version")]
    parts = [
        str(env.get("cpu") or "unknown processor"),
        f"{env.get('usable_cores')} of {env.get('cores')} cores",
        size(memory) if isinstance(memory, int) else "",
        str(env.get("os") or ""),
        *versions,
    ]
    return " · ".join(part for part in parts if part)


def _rows(record: BenchRecord) -> list[Row]:
    waits = f"waiting {record.wait_share:.2%} of the time"
    if record.wait_share > MAX_WAIT_SHARE:
        waits += " (over 1 %: do not trust this run)"
    device = "not measured" if record.peak_device_bytes is None else size(record.peak_device_bytes)
    host = "unknown" if record.peak_host_bytes is None else size(record.peak_host_bytes)
    return [
        ("TTFT", ms(record.ttft_ms.mean), _spread(record.ttft_ms)),
        ("ITL", ms(record.itl_ms.mean), _spread(record.itl_ms)),
        ("prefill", rate(record.prefill_tokens_per_s), _verdict(record.prefill_verdict)),
        ("decode", rate(record.decode_tokens_per_s), _verdict(record.decode_verdict)),
        ("", "", waits),
        ("MFU (prefill)", _percent(record.mfu), _peak(record.measured_flops_per_s, "FLOP/s")),
        ("MBU (decode)", _percent(record.mbu), _peak(record.measured_bandwidth_bytes_per_s, "B/s")),
        (
            "bytes per token",
            size(record.weight_bytes_per_token),
            f"of weights, plus {size(record.kv_bytes_per_token)} of K and V per cached token",
        ),
        ("load", ms(record.load_ms), ""),
        ("peak memory", host, f"device: {device}"),
    ]


def _spread(values: Distribution) -> str:
    parts = [f"sd {ms(values.sd)}", f"p50 {ms(values.p50)}"]
    parts.append(f"p95 {ms(values.p95)}" if values.p95 is not None else "p95 n too small")
    return f"{', '.join(parts)}, n {len(values.samples)}"


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return "nothing to judge"
    return (
        f"{verdict.bound.value}: {ms(verdict.measured_ms)} where the roofline says "
        f"{ms(verdict.roofline_ms)}"
    )


def _peak(value: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"of {value / factor:.3g} {prefix}{unit} measured here"
    return f"of {value:.3g} {unit} measured here"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
