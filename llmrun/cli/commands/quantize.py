"""``llmrun quantize``: make a quantized checkpoint that other engines load too."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.options import (
    AllowPartial,
    Calibrate,
    GeneralOptions,
    ModelArgument,
    ModelOption,
    Requantize,
    Revision,
    TargetBpw,
    spread,
    the_model,
)
from llmrun.cli.session import Session
from llmrun.cli.units import size

if TYPE_CHECKING:
    from llmrun.cli.choice import CopyOptions
    from llmrun.quant.audit import Coverage


class Portable(StrEnum):
    """What is done about weights that other engines cannot load."""

    ON = "on"
    AUTO = "auto"
    OFF = "off"


@spread
def command(
    context: typer.Context,
    named: ModelArgument = None,
    *,
    model: ModelOption = None,
    quant: Annotated[
        str,
        typer.Option("--quant", "-q", metavar="SCHEME", help="int8, int4, nl4, nf4 or another."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="A new folder; without it, the store."),
    ] = None,
    revision: Revision = None,
    requantize: Requantize = False,
    calibrate: Calibrate = "auto",
    target_bpw: TargetBpw = None,
    allow_partial: AllowPartial = False,
    portable: Annotated[
        Portable,
        typer.Option(
            "--portable",
            help="What vLLM cannot load: on refuses it, auto says where, off is quiet.",
        ),
    ] = Portable.AUTO,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan only.")] = False,
    general: GeneralOptions,
) -> None:
    """Quantize a model; other engines load the result."""
    from llmrun.cli import quantizing
    from llmrun.cli.apart import apart
    from llmrun.cli.choice import CopyOptions
    from llmrun.cli.loading import check_scheme
    from llmrun.cli.progress import for_session
    from llmrun.cli.tensor_progress import tensor_progress
    from llmrun.formats.portable import check
    from llmrun.store.export import refuse_existing

    session: Session = context.obj.with_options(general)
    name = the_model(named, model)
    check_scheme(quant)
    if out is not None:
        refuse_existing(out)
    options = CopyOptions(calibrate, target_bpw, allow_partial)
    progress = for_session(session)
    asked = quantizing.order(
        name, quant, session.settings, progress, options, revision, requantize=requantize
    )
    chosen = f"{name} -q {quant}{_repeated(requantize, options)}" if out is None else str(out)
    ready = quantizing.kept(asked, session.settings) if out is None else None
    if ready is not None:
        session.say(f"{name} is in the store in {quant} already: {ready}")
        session.say(f"Run it with: llmrun chat {chosen}")
        return
    finding = f"finding what needs 8 bits in {name}"
    with tensor_progress(progress, finding, "layers") as on_work:
        conversion, notes = apart(
            lambda stopped: quantizing.plan(asked, quantizing.heeding(stopped, on_work))
        )
    if out is not None or portable is Portable.ON:
        # A copy in the store is for llmrun alone.
        notes += check(conversion.content.layout.planned, portable.value)
    for note in notes:
        session.say(f"note: {note}")
    session.say(
        f"{name}: {conversion.quantized} weights to {quant}, "
        f"about {size(conversion.predicted_bytes)} in all"
    )
    if dry_run:
        return
    try:
        with tensor_progress(progress, f"quantizing {name} to {quant}") as on_tensor:
            result = apart(
                lambda stopped: quantizing.quantize(
                    asked, conversion, out, session.settings, on_tensor, stopped
                )
            )
    except KeyboardInterrupt:
        if out is None or not out.exists():  # else it came too late to stop anything
            session.say(
                "Stopped. Finished files (of 256 MB each) are kept for a week: "
                "run the same command again to go on behind them."
            )
        raise
    for note in result.notes:
        session.say(f"note: {note}")
    show_coverage(session, result.coverage)
    session.say(f"{quant} takes {size(result.files_bytes)} in {result.path}")
    session.say(f"Run it with: llmrun chat {chosen}")


def _repeated(requantize: bool, options: "CopyOptions") -> str:
    """The options with which chat finds the copy in the store again."""
    words = ["--requantize"] if requantize else []
    if options.calibrate != "auto":
        words += ["--calibrate", options.calibrate]
    if options.target_bpw is not None:
        words += ["--target-bpw", f"{options.target_bpw:g}"]
    return "".join(f" {word}" for word in words)


def show_coverage(session: Session, coverage: "Coverage") -> None:
    """Role by role, the bits that were counted."""
    from llmrun.cli.tables import show_table

    rows = [
        (
            role.value,
            str(part.tensors),
            f"{part.parameters:,}",
            size(part.nbytes),
            f"{part.bits_per_weight:.3f}",
        )
        for role, part in coverage.roles.items()
    ]
    total = coverage.total
    rows.append(
        (
            "all",
            str(total.tensors),
            f"{total.parameters:,}",
            size(total.nbytes),
            f"{total.bits_per_weight:.3f}",
        )
    )
    show_table(session, ("ROLE", "TENSORS", "WEIGHTS", "SIZE", "BITS PER WEIGHT"), rows)
    for kept in coverage.unquantized:
        session.say(f"kept {kept.name} as {kept.kind}: {kept.reason}")
