"""``llmrun eval``: how much a model loses by being quantized."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.options import (
    AllowPartial,
    Calibrate,
    GeneralOptions,
    Json,
    ModelArgument,
    ModelOption,
    Requantize,
    Revision,
    TargetBpw,
    device_name,
    spread,
    the_model,
)
from llmrun.cli.session import Session
from llmrun.errors import UsageError

if TYPE_CHECKING:
    from llmrun.cli.evaluation import Evaluation


@spread
def command(
    context: typer.Context,
    named: ModelArgument = None,
    *,
    model: ModelOption = None,
    quant: Annotated[
        str | None,
        typer.Option("--quant", "-q", metavar="SCHEME", help="One or several: int8,int4,nf4."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="REF", help="The model to compare with."),
    ] = None,
    requantize: Requantize = False,
    calibrate: Calibrate = "auto",
    target_bpw: TargetBpw = None,
    allow_partial: AllowPartial = False,
    revision: Revision = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="A text of yours; else one of llmrun's own."),
    ] = None,
    window: Annotated[
        int,
        typer.Option("--context", min=4, metavar="N", help="Tokens of a window; half are scored."),
    ] = 512,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", min=1, metavar="N", help="Score at least so many (else read 8,192)."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Read 65,536 tokens.")] = False,
    as_json: Json = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw charts below the table.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with charts.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", parser=device_name, metavar="DEVICE", help="auto, cpu, cuda or cuda:N."
        ),
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=-1, metavar="N", help="Threads on the CPU; 0 or -1: auto."),
    ] = None,
    cpu_isa: Annotated[
        str | None,
        typer.Option("--cpu-isa", metavar="NAME", help="Instruction set.", hidden=True),
    ] = None,
    general: GeneralOptions,
) -> None:
    """Measure what a model loses by being quantized.

    Its predictions are compared with those of the model it was made from, token by token:
    `llmrun eval MODEL -q int4` quantizes on the way; `llmrun eval DIR --against REF` compares two.
    """
    from llmrun.cli import evaluation
    from llmrun.cli.choice import CopyOptions
    from llmrun.cli.eval_progress import work_progress
    from llmrun.cli.eval_text import DEFAULT_TOKENS, FULL_TOKENS, Extent
    from llmrun.cli.progress import for_session

    session: Session = context.obj.with_options(general)
    name = the_model(named, model)
    if full and tokens is not None:
        raise UsageError("--full and --tokens both say how much to read.", "Give one of them.")
    options = evaluation.EvalOptions(
        model=name,
        schemes=scheme_names(quant),
        against=against,
        revision=revision,
        text=text,
        extent=Extent(window, tokens, FULL_TOKENS if full else DEFAULT_TOKENS),
        copying=CopyOptions(calibrate, target_bpw, allow_partial),
        requantize=requantize,
        device=device,
        threads=threads,
        cpu_isa=cpu_isa,
        by_layer=as_json or plot or html is not None,
    )
    if html is not None:
        check_writable(html)
    prepared = evaluation.prepare(options, session.settings, for_session(session))
    said = f"comparing {', '.join(child.scheme for child in prepared.children)} with "
    with work_progress(session, f"{said}{prepared.reference.title}") as on_work:
        found = evaluation.evaluate(options, prepared, on_work)
    for note in found.notes:
        session.say(f"note: {note}")
    show(session, found, as_json=as_json, plot=plot, html=html)
    evaluation.refuse_nonfinite(found.records)


def scheme_names(text: str | None) -> tuple[str, ...]:
    """The schemes of a list with commas. UnavailableError for one nobody knows, UsageError for
    none or one named twice."""
    from llmrun.cli.loading import check_scheme

    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        check_scheme(name)
        if names.count(name) > 1:
            raise UsageError(f"-q {text} names {name} twice.", "Name each scheme once.")
    return names


def check_writable(file: Path) -> None:
    """UsageError now rather than after minutes of work, if a report cannot be written there."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise UsageError(f"--html {file} is no place for a file.", "Name a file in a folder.")


def show(
    session: Session, found: "Evaluation", *, as_json: bool, plot: bool, html: Path | None
) -> None:
    """Results on stdout, the report in its file."""
    from llmrun.cli.eval_record import document
    from llmrun.cli.eval_table import eval_text, verdict_text
    from llmrun.cli.tables import show_json, show_text

    records = found.records
    if as_json:
        show_json(session, document(records))
    else:
        parts = [eval_text(records)]
        if plot:
            from llmrun.cli.eval_plot import charts

            parts.append(charts(records, session.terminal.columns()))
        show_text(session, "\n".join([*parts, verdict_text(records)]))
    if html is not None:
        from llmrun.cli.eval_html import page

        html.write_text(page(records), encoding="utf-8")
        session.say(f"report in {html}")
