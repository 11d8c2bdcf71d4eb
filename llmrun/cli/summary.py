"""What is said about one answer: the live line, the line after it, the full account."""

from collections.abc import Sequence

from llmrun.cli.units import ms, rate
from llmrun.engine.events import Finish
from llmrun.measure.coldstart import Stage
from llmrun.measure.live import Reading
from llmrun.measure.statistics import RequestStats, percentile

_ENDED = {
    Finish.LENGTH: "stopped at --max-tokens",
    Finish.CONTEXT: "context full",
    Finish.INTERRUPTED: "interrupted",
}


def live_line(reading: Reading) -> str:
    """While it decodes; the most important first, because a narrow terminal cuts the end."""
    parts = [
        f"TTFT {ms(reading.ttft_ms)}",
        f"ITL p50 {ms(reading.itl_p50_ms)}, last {ms(reading.itl_last_ms)}",
        rate(reading.tokens_per_s),
        f"context {reading.context_tokens:,}/{reading.context_limit:,}",
    ]
    if reading.mbu is not None:
        parts.append(f"MBU {reading.mbu:.0%}")
    return " · ".join(parts)


def prefill_line(done: int, total: int, elapsed_s: float) -> str:
    """While it prefills: tokens done, speed, time left."""
    line = f"prefill {done:,}/{total:,} tokens"
    if not done or not elapsed_s:
        return line
    speed = done / elapsed_s
    return f"{line} · {rate(speed)} · {(total - done) / speed:.1f} s left"


def answer_line(stats: RequestStats, finish: Finish) -> str:
    """One line after the answer."""
    itl = [gap / 1e6 for gap in stats.itl_ns]
    shown = [f"p{p} {ms(value)}" for p in (50, 95, 99) if (value := percentile(itl, p)) is not None]
    parts = [f"TTFT {ms(stats.ttft_ns / 1e6)}"]
    if shown:
        parts.append(f"ITL {', '.join(shown)}")
    speed = stats.decode_tokens_per_s
    parts.append(_count(stats.generated_tokens) + (f", {rate(speed)}" if speed else ""))
    cached = f" (+{stats.cached_tokens:,} cached)" if stats.cached_tokens else ""
    prefill = f"prefill {_count(stats.computed_tokens)}{cached}"
    parts.append(f"{prefill}, {rate(stats.prefill_tokens_per_s)}")
    if finish in _ENDED:
        parts.append(_ENDED[finish])
    return " · ".join(parts)


def full_account(stats: RequestStats, finish: Finish, cold: Sequence[Stage] = ()) -> str:
    """Every measure, one a line, with the parts of the time to first token.

    ``cold``: the stages from the start of the process to the first token, if they are known.
    """
    itl = [gap / 1e6 for gap in stats.itl_ns]
    parts = stats.parts
    split = (
        f"tokenize {ms(parts.tokenize_ns / 1e6)}, hand-over {ms(parts.handover_ns / 1e6)}, "
        f"cache lookup {ms(parts.lookup_ns / 1e6)}, prefill {ms(parts.prefill_ns / 1e6)}, "
        f"first sample {ms(parts.sample_ns / 1e6)}"
    )
    percentiles = ", ".join(
        f"p{p} {'n too small' if (v := percentile(itl, p)) is None else ms(v)}"
        for p in (50, 95, 99)
    )
    tpot = stats.tpot_ns
    rows = [
        ("TTFT", f"{ms(stats.ttft_ns / 1e6)}  ({split})"),
        ("ITL", f"{percentiles}, max {ms(max(itl, default=None))}, n {len(itl)}"),
        ("TPOT", ms(None if tpot is None else tpot / 1e6)),
        ("decode", f"{rate(stats.decode_tokens_per_s)}, waiting {stats.wait_share:.1%}"),
        ("prefill", rate(stats.prefill_tokens_per_s)),
        ("prompt", f"{_count(stats.prompt_tokens)}, {stats.cached_tokens:,} from the cache"),
        ("answer", f"{_count(stats.generated_tokens)}, {_ENDED.get(finish, 'ended by itself')}"),
    ]
    if cold:
        rows.insert(1, ("cold", _waterfall(cold)))
    return "\n".join(f"{name:<8} {value}" for name, value in rows)


def _waterfall(stages: Sequence[Stage]) -> str:
    total_ns = sum(stage.duration_ns for stage in stages)
    parts = ", ".join(f"{stage.name} {ms(stage.duration_ns / 1e6)}" for stage in stages)
    return f"TTFT {ms(total_ns / 1e6)} from the start of the process  ({parts})"


def _count(tokens: int) -> str:
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"
