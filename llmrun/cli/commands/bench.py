"""``llmrun bench``: measure prefill and decode of a model on this machine."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.options import (
    GeneralOptions,
    ModelArgument,
    ModelOptions,
    one_model,
    spread,
)
from llmrun.cli.session import Session
from llmrun.errors import ContextError

if TYPE_CHECKING:
    from llmrun.cli.assemble import LoadedModel
    from llmrun.measure.bench import Shape
    from llmrun.measure.record import BenchRecord


class Format(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"
    MD = "md"


@spread
def command(
    context: typer.Context,
    named: ModelArgument = None,
    *,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "-p", min=1, metavar="N", help="Length of the prompt.")
    ] = 512,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", "-n", min=1, metavar="N", help="Tokens to generate.")
    ] = 128,
    repeats: Annotated[
        int, typer.Option("--repeats", "-r", min=1, metavar="N", help="After one warm-up.")
    ] = 5,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the random prompt.")] = 0,
    output: Annotated[Format, typer.Option("--output", "-o", help="Format on stdout.")] = (
        Format.TABLE
    ),
    model: ModelOptions,
    general: GeneralOptions,
) -> None:
    """Measure prefill and decode on this machine.

    The cache has room for -p plus -n tokens, or for --ctx tokens if that is given.
    """
    from llmrun.cli.loading import load
    from llmrun.cli.progress import activity
    from llmrun.measure.bench import Shape

    session: Session = context.obj.with_options(general)
    shape = Shape(prompt_tokens, output_tokens, repeats=repeats)
    name = session.model(one_model(named, model.model))
    if model.ctx:
        _check_room(shape, model.ctx, f"--ctx {model.ctx} has room for {model.ctx:,}")
    loaded = load(session, name, model)
    _check_room(shape, loaded.context, f"{name} has a context of {loaded.context:,} here")
    with activity(session, f"measuring {repeats} + 1 runs ..."):
        record = _measure(loaded, shape, model.ctx or shape.total_tokens, seed)
    _show(session, record, output)


def _check_room(shape: "Shape", n_tokens: int, has: str) -> None:
    if shape.total_tokens > n_tokens:
        raise ContextError(
            f"-p {shape.prompt_tokens} and -n {shape.output_tokens} make {shape.total_tokens:,} "
            f"tokens, but {has}.",
            "Give a smaller -p or -n, or a larger --ctx if the model was trained for it.",
        )


def _measure(
    loaded: "LoadedModel", shape: "Shape", capacity_tokens: int, seed: int
) -> "BenchRecord":
    from llmrun.cli.receipt import versions
    from llmrun.engine.cache import KvCache
    from llmrun.measure.bench import Subject, bench
    from llmrun.measure.ceilings import Ceilings
    from llmrun.measure.environment import environment

    subject = Subject(
        model=loaded.local.alias or loaded.local.name,
        revision=loaded.local.revision,
        scheme=loaded.scheme,
        bits_per_weight=loaded.coverage.total.bits_per_weight,
        load_ms=loaded.times.total_ms,
        vocab=min(loaded.tokenizer.n_ids, loaded.spec.vocab),
        special_ids=loaded.tokenizer.special_ids,
    )
    return bench(
        loaded.decoder,
        KvCache(loaded.backend, loaded.spec, 1, capacity_tokens, loaded.kv_form),
        subject,
        shape,
        Ceilings(loaded.backend),
        environment(versions()),
        seed=seed,
    )


def _show(session: Session, record: "BenchRecord", output: Format) -> None:
    from llmrun.cli.bench_table import bench_table, markdown
    from llmrun.cli.tables import show_json, show_text
    from llmrun.measure.record import document

    if output is Format.JSON:
        show_json(session, document([record]))
    elif output is Format.MD:
        show_text(session, markdown(record))
    else:
        show_text(session, bench_table(record))
    for warning in record.warnings:
        session.say(f"warning: {warning}")
