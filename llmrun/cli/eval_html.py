"""The report of an evaluation: one HTML file that needs nothing else, for light and dark."""

from collections.abc import Sequence
from html import escape

import llmrun
from llmrun.cli import eval_svg
from llmrun.cli.eval_record import WORST, EvalRecord
from llmrun.cli.eval_table import MEANING, decibels, decimals, number, plus_minus, ratio
from llmrun.cli.units import size
from llmrun.quant.fidelity import Verdict

LIGHT = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#b91c1c")
DARK = ("#7aa7ff", "#f5b04c", "#4fd1a1", "#f783ac", "#b794f6", "#4dd0e1", "#a3d65c", "#fc8181")

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f7f9; --ink: #1b1f24;
  --soft: #5b6470; --rule: #dfe3e8; LIGHT }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1c2127; --ink: #e6e9ed;
  --soft: #9aa4b0; --rule: #333b44; DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 74rem; background: var(--back);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .6rem }
p { margin: .25rem 0; max-width: 60rem } .soft { color: var(--soft) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .42rem .9rem .42rem 0; text-align: right; border-bottom: 1px solid var(--rule);
  white-space: nowrap }
th { font-weight: 600; color: var(--soft); font-size: .85rem }
.scroll + .scroll { margin-top: 1.25rem }
th:first-child, td:first-child, .left { text-align: left }
.pill { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .85rem;
  font-weight: 600; color: var(--back) }
.lossless-ish { background: var(--c2) } .good { background: var(--c0) }
.visible { background: var(--c1) } .bad { background: var(--c7) } .none { background: var(--soft) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr));
  gap: 1.25rem }
figure { margin: 0; padding: 1rem; background: var(--card); border-radius: .6rem }
figcaption { font-weight: 600; margin-bottom: .1rem } figure p { font-size: .88rem }
svg { display: block; width: 100%; height: auto; margin-top: .5rem;
  font: 13px system-ui, sans-serif }
svg text { fill: var(--ink) } svg .tick, svg .note { fill: var(--soft) }
.mid { text-anchor: middle } .end { text-anchor: end } .name { font-weight: 600 }
.grid { stroke: var(--rule); stroke-width: 1 } .axis { stroke: var(--soft) }
.limit { stroke: var(--soft); stroke-dasharray: 4 4 }
.line { fill: none; stroke-width: 2 }
details { border-bottom: 1px solid var(--rule); padding: .5rem 0 }
summary { cursor: pointer; font-weight: 600 }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 0 2.5rem; align-items: start; margin-top: .5rem }
code { font: .8em ui-monospace, monospace; overflow-wrap: anywhere }
"""

NOTES = """KL divergence says how far the child's distribution over the next token is from the
reference's, in nats, averaged over all scored positions; 0 is the same model. The noise floor is
the KL of the reference against itself with its hidden states shaken by 2<sup>-9</sup> after every
layer, as 16-bit arithmetic might: a KL near it means nothing. KL by layer applies final norm and
head behind each layer, on a few positions of the text. Signal to noise compares the hidden
states behind each layer, each token weighing alike. This is fidelity to the reference, not a score
on a task."""


def page(records: Sequence[EvalRecord]) -> str:
    """The whole page."""
    first = records[0]
    title = f"Fidelity of {first.subject.model}"
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="soft">{line}</p>' for line in _about(first)),
        "<h2>Schemes</h2>",
        _summary(records),
        '<h2>Charts</h2><div class="charts">',
        *_charts(records),
        "</div><h2>In full</h2>",
        *(_details(record, open_=len(records) == 1) for record in records),
        f'<h2>What is measured</h2><p class="soft">{NOTES}</p>',
        *(f'<p class="soft">{line}</p>' for line in _made(first)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _style() -> str:
    colours = [
        " ".join(f"--c{i}: {colour};" for i, colour in enumerate(palette))
        for palette in (LIGHT, DARK)
    ]
    series = "\n".join(
        f".f{i} {{ fill: var(--c{i}) }} .l{i} {{ stroke: var(--c{i}) }} "
        f"svg .t{i} {{ fill: var(--c{i}) }}"
        for i in range(eval_svg.COLOURS)
    )
    return STYLE.replace("LIGHT", colours[0]).replace("DARK", colours[1]) + series


def _about(record: EvalRecord) -> list[str]:
    subject, scored = record.subject, record.scored
    same = subject.model == subject.reference
    against = "the same model as stored" if same else subject.reference
    text = "llmrun's own text" if scored.text == "bundled" else scored.text
    return [
        escape(f"Compared with {against} ({subject.reference_stored}), computed in fp32."),
        escape(
            f"{scored.windows} windows of {scored.context} tokens of {text}, "
            f"{record.fidelity.tokens:,} positions scored; "
            f"noise floor: KL {number(record.floor.kl.mean)}."
        ),
    ]


def _summary(records: Sequence[EvalRecord]) -> str:
    head = (
        "scheme", "bits per weight", "in memory", "KL", "99 % KL", "same top token",
        "rms Δp", "perplexity", "ratio", "verdict",
    )  # fmt: skip
    rows = []
    for record in records:
        found, word = record.fidelity, record.verdict
        rows.append(
            [
                f"<strong>{escape(record.subject.scheme)}</strong>",
                f"{record.weighed.bits_per_weight:.2f}",
                size(record.weighed.resident_bytes),
                plus_minus(found.kl.mean, found.kl.se),
                number(found.kl.p99),
                _percent(found.top1.value),
                _percent(found.rms_delta_p, 2),
                decimals(found.ppl),
                ratio(found.ppl_ratio),
                f'<span class="pill {word or "none"}">{word or "none"}</span>',
            ]
        )
    return _table(head, rows)


def _charts(records: Sequence[EvalRecord]) -> list[str]:
    drawn = [
        (
            eval_svg.kl_by_bits(records) if len(records) > 1 else "",
            "KL against bits per weight",
            "Lower left is better; the scale of KL is logarithmic.",
        ),
        (
            eval_svg.kl_by_layer(records),
            "KL by layer",
            "Lower is better: what final norm and head would predict if this layer were the last.",
        ),
        (
            eval_svg.sqnr_by_layer(records),
            "Signal to noise of hidden states",
            "Higher is better; where a line falls steeply, that layer costs most.",
        ),
        (
            eval_svg.kl_by_percentile(records),
            "KL of typical and of rare positions",
            "A far-off maximum is one token in thousands; the 99 % point is felt.",
        ),
        (
            eval_svg.kl_by_confidence(records),
            "KL by how sure the reference is",
            "Errors where it is sure change answers; where it is not, many answers would do.",
        ),
    ]
    return [
        f'<figure><figcaption>{escape(title)}</figcaption><p class="soft">{escape(said)}</p>'
        f"{chart}</figure>"
        for chart, title, said in drawn
        if chart
    ]


def _details(record: EvalRecord, *, open_: bool) -> str:
    found, word = record.fidelity, record.verdict
    kl, dp = found.kl, found.delta_p
    names = ("min", "p1", "p10", "median", "p90", "p99", "p99_9", "max")
    labels = ("min", "1 %", "10 %", "50 %", "90 %", "99 %", "99.9 %", "max")
    spread = [
        [label, number(getattr(kl, name)), _signed(getattr(dp, name))]
        for name, label in zip(names, labels, strict=True)
    ]
    tensors = [
        [
            f"<code>{escape(error.name)}</code>",
            escape(error.kind),
            f"{100 * error.relative_mse:.4f} %",
        ]
        for error in record.measured.tensors[:WORST]
    ]
    facts = [
        ["bits per weight, linear layers", f"{record.weighed.bits_per_linear_weight:.3f}"],
        ["KL over the noise floor", _fixed(record.kl_over_floor, 1)],
        ["same top token, where p > 0.9", _percent(found.top1_confident.value)],
        ["perplexity of the reference", decimals(found.ppl_reference)],
        ["correlation of log-probabilities", _percent(found.correlation, 2)],
        ["signal to noise at the end", decibels(record.measured.sqnr_db[-1])],
        ["positions not finite", f"{record.nonfinite:,}"],
    ]
    meaning = MEANING[word] if word in tuple(Verdict) else "nothing could be compared"
    return (
        f"<details{' open' if open_ else ''}><summary>{escape(record.subject.scheme)}: "
        f"{word or 'no verdict'}</summary>"
        f'<p class="soft">{escape(meaning)}</p><div class="pair">'
        f"<div>{_table(('', ''), facts)}{_table(('positions', 'KL', 'Δp'), spread)}</div>"
        f"<div>{_table(('worst tensors', 'stored as', 'relative MSE'), tensors)}</div>"
        "</div></details>"
    )


def _made(record: EvalRecord) -> list[str]:
    setup, scored = record.setup, record.scored
    cpu = setup.env.get("cpu") or setup.device
    peak = "unknown" if setup.peak_host_bytes is None else size(setup.peak_host_bytes)
    kernels = f"{setup.kernels} kernels{f' ({setup.isa})' if setup.isa else ''}"
    return [
        escape(
            f"Made by llmrun {llmrun.__version__} on {cpu}, {kernels}, {setup.threads} threads, "
            f"in {setup.seconds:.0f} s with at most {peak} of memory."
        ),
        f"Text <code>sha256:{escape(scored.text_sha256)}</code>, token ids "
        f"<code>sha256:{escape(scored.token_ids_sha256)}</code>, "
        f"{'each window begins with a BOS' if scored.bos else 'no BOS'}.",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``rows`` are HTML already."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    shown = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{shown}<tbody>{body}</tbody></table></div>'


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.2f} %"


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
