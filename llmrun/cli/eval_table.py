"""Evaluations as a person reads them: one scheme in full, several side by side, a verdict each.

Plain text of at most 80 columns, so that it pipes.
"""

import math
from collections.abc import Sequence

from llmrun.cli.eval_record import WORST, EvalRecord
from llmrun.cli.units import size
from llmrun.quant.fidelity import (
    GOOD_KL,
    LOSSLESS_FLOORS,
    LOSSLESS_KL,
    VISIBLE_KL,
    Fidelity,
    Share,
    Verdict,
)

HEAD = ("measure", "value", "detail")
Row = tuple[str, str, str]

MEANING = {
    Verdict.LOSSLESS: f"KL at most {LOSSLESS_KL:g}, or {LOSSLESS_FLOORS:g} times the noise floor",
    Verdict.GOOD: f"KL at most {GOOD_KL:g}",
    Verdict.VISIBLE: f"KL at most {VISIBLE_KL:g}: answers differ now and then",
    Verdict.BAD: f"KL over {VISIBLE_KL:g}: answers differ often",
}


def eval_text(records: Sequence[EvalRecord]) -> str:
    """All there is to say about one scheme, or a line for each of several."""
    if len(records) == 1:
        (record,) = records
        return "\n".join([*_titles(record), "", table(record), "", worst(record), ""])
    return "\n".join([*_shared_titles(records[0]), "", ladder(records), ""])


def table(record: EvalRecord) -> str:
    """Measure, value and detail of one scheme, in aligned columns."""
    return _aligned([HEAD, *_rows(record)])


def ladder(records: Sequence[EvalRecord]) -> str:
    """One line for each scheme."""
    head = ("scheme", "bits", "KL ± se", "99 % KL", "same top", "PPL x", "verdict")
    return _aligned([head, *(_rung(record) for record in records)])


def worst(record: EvalRecord) -> str:
    """The tensors whose weights are furthest from the reference's."""
    rows = [
        (_short(error.name), error.kind, f"{100 * error.relative_mse:.4f} %")
        for error in record.measured.tensors[:WORST]
        if error.relative_mse
    ]
    if not rows:
        return "all weights are those of the reference"
    return _aligned([("worst tensors", "stored as", "relative squared error"), *rows])


def verdict_text(records: Sequence[EvalRecord]) -> str:
    """The last word on a scheme; of several, what the words in their lines mean."""
    if len(records) > 1:
        return (
            f"verdict by KL: lossless-ish to {LOSSLESS_KL:g} (or {LOSSLESS_FLOORS:g} times the "
            f"floor), good to {GOOD_KL:g},\nvisible to {VISIBLE_KL:g}, bad above"
        )
    (record,) = records
    word = record.verdict
    name = f"{record.subject.scheme}, {record.weighed.bits_per_weight:.2f} bits"
    if word is None:
        return f"verdict: none ({name}): no position could be compared"
    return f"verdict: {word} ({name}): {MEANING[word]}"


def _titles(record: EvalRecord) -> list[str]:
    weighed = record.weighed
    files = "" if weighed.file_bytes is None else f" · {size(weighed.file_bytes)} of files"
    return [
        *_fitted(
            f"{record.subject.model} · {record.subject.scheme}", f"against {_reference(record)}"
        ),
        f"{weighed.bits_per_weight:.2f} bits per weight (linear layers "
        f"{weighed.bits_per_linear_weight:.2f}) · {size(weighed.resident_bytes)} in memory{files}",
        _text_line(record),
    ]


def _shared_titles(record: EvalRecord) -> list[str]:
    subject = record.subject
    return [
        *_fitted(subject.model, f"against {_reference(record)}"),
        _text_line(record),
        f"noise floor: KL {number(record.floor.kl.mean)} · took {record.setup.seconds:.1f} s · "
        f"peak memory {_memory(record)}",
    ]


def _fitted(what: str, against: str) -> list[str]:
    """On one line if there is room."""
    return [f"{what} {against}"] if len(what) + len(against) < 80 else [what, against]


def _reference(record: EvalRecord) -> str:
    subject = record.subject
    same = subject.model == subject.reference
    name = "the same model as stored" if same else subject.reference
    return f"{name} ({subject.reference_stored})"


def _text_line(record: EvalRecord) -> str:
    scored = record.scored
    name = "bundled text" if scored.text == "bundled" else scored.text
    return (
        f"{name} · {scored.windows} windows of {scored.context} tokens, "
        f"{record.fidelity.tokens:,} scored · {'BOS first' if scored.bos else 'no BOS'}"
    )


def _rows(record: EvalRecord) -> list[Row]:
    found, setup = record.fidelity, record.setup
    kl = found.kl
    times = record.kl_over_floor
    beside = "" if times is None else f"KL is {_times(times)} times the floor"
    rows: list[Row] = [
        ("KL divergence", plus_minus(kl.mean, kl.se), "nats; 0 is the same model"),
        ("  noise floor", number(record.floor.kl.mean), beside),
        ("  percentiles", "", _listed((("50", kl.median), ("90", kl.p90), ("95", kl.p95)))),
        ("", "", _listed((("99", kl.p99), ("99.9", kl.p99_9), ("100", kl.max)))),
    ]
    rows += [
        (
            f"  sure {100 * bucket.low:.0f}-{100 * bucket.high:.0f} %",
            number(bucket.kl),
            f"{bucket.tokens:,} positions",
        )
        for bucket in found.kl_by_confidence
    ]
    rows += [
        (
            "same top token",
            _share(found.top1),
            f"{_share(found.top1_confident)} of those over 90 %",
        ),
        *_probability_rows(found),
        *_perplexity_rows(found),
        *_layer_rows(record),
        ("took", f"{setup.seconds:.1f} s", f"peak memory {_memory(record)}"),
    ]
    if record.nonfinite:
        rows.insert(0, ("not finite", f"{record.nonfinite:,}", "positions, left out below"))
    return rows


def _probability_rows(found: Fidelity) -> list[Row]:
    p = found.delta_p
    spread = (("1", p.p1), ("10", p.p10), ("90", p.p90), ("99", p.p99))
    listed = ", ".join(
        f"{name} % {100 * value:+.1f}" for name, value in spread if value is not None
    )
    return [
        (
            "probability",
            f"rms {_percent(found.rms_delta_p)}",
            f"change of the text's next token; mean {_signed(p.mean)}",
        ),
        ("", "", listed),
    ]


def _perplexity_rows(found: Fidelity) -> list[Row]:
    times, se = found.ppl_ratio, found.log_ppl_ratio_se
    shown = ratio(times)
    if times is not None and times < 1000 and se is not None:
        shown += f" ± {times * se:.4f}"
    return [
        ("perplexity", decimals(found.ppl), f"reference {decimals(found.ppl_reference)}"),
        ("  ratio", shown, f"log-probabilities correlate to {_percent(found.correlation)}"),
    ]


def _layer_rows(record: EvalRecord) -> list[Row]:
    sqnr = record.measured.sqnr_db
    finite = [(value, layer) for layer, value in enumerate(sqnr) if not math.isnan(value)]
    if not finite:
        return []
    lowest, layer = min(finite)
    return [
        (
            "hidden states",
            decibels(sqnr[-1]),
            f"at the end; lowest {decibels(lowest)} behind layer {layer}",
        )
    ]


def _rung(record: EvalRecord) -> tuple[str, ...]:
    found = record.fidelity
    return (
        record.subject.scheme,
        f"{record.weighed.bits_per_weight:.2f}",
        plus_minus(found.kl.mean, found.kl.se),
        number(found.kl.p99),
        "-" if found.top1.value is None else f"{100 * found.top1.value:.1f} %",
        ratio(found.ppl_ratio),
        str(record.verdict or "-"),
    )


def number(value: float | None) -> str:
    """Three digits, also of small numbers, without exponents."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 7)}f}"


def decimals(value: float | None) -> str:
    """A perplexity."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1e6 else "over 1,000,000"


def ratio(value: float | None) -> str:
    """Four decimals; of what is beyond all comparison, that it is."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 1000 else "over 1,000"


def plus_minus(value: float | None, se: float | None) -> str:
    """A value with its standard error, in the same digits."""
    if value is None or se is None:
        return number(value)
    if value == 0:
        return "0"
    digits = min(7, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:.{digits}f} ± {se:.{digits}f}"


def decibels(value: float) -> str:
    """A ratio of signal to noise; of states that are the same, in a word."""
    if math.isnan(value):
        return "not finite"
    return "exact" if math.isinf(value) else f"{value:.1f} dB"


def _share(share: Share) -> str:
    if share.value is None:
        return "-"
    se = "" if share.se is None else f" ± {100 * share.se:.1f}"
    return f"{100 * share.value:.1f}{se} %"


def _listed(values: Sequence[tuple[str, float | None]]) -> str:
    return ", ".join(f"{name} % {number(value)}" for name, value in values if value is not None)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _memory(record: EvalRecord) -> str:
    peak = record.setup.peak_host_bytes
    return "unknown" if peak is None else size(peak)


def _times(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short(name: str) -> str:
    return name.removeprefix("model.").removesuffix(".weight")


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
