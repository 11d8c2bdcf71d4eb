"""``llmrun list``: the models on this machine, or those of the catalog."""

from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.options import GeneralOptions, Json, spread
from llmrun.cli.session import Session
from llmrun.cli.units import size

if TYPE_CHECKING:
    from llmrun.store.derived import Derived


@spread
def command(
    context: typer.Context,
    *,
    catalog: Annotated[
        bool, typer.Option("--catalog", help="The models llmrun knows by a short name.")
    ] = False,
    as_json: Json = False,
    general: GeneralOptions,
) -> None:
    """Show the models on this machine, or in the catalog."""
    session: Session = context.obj.with_options(general)
    if catalog:
        _show_catalog(session, as_json)
    else:
        _show_store(session, as_json)


def _show_store(session: Session, as_json: bool) -> None:
    from llmrun.cli.model_json import derived_json, local_json
    from llmrun.cli.tables import show_json, show_table
    from llmrun.store.store import Store

    store = Store(session.settings.store_root)
    models, made = store.models(), store.derived()
    if as_json:
        document = {
            "models": [local_json(model) for model in models],
            "quantized": [derived_json(item) for item in made],
        }
        show_json(session, document)
        return
    if not models and not made:
        session.say(
            "No models here yet. `llmrun list --catalog` shows names, `llmrun pull` gets one."
        )
        return
    rows: list[tuple[str, ...]] = []
    for model in models:
        source, revision = f"{model.source} {model.origin}", (model.revision or "")[:12]
        name = model.alias or model.name
        rows.append((name, size(model.bytes), source, revision, _state(model.problem)))
        rows += [_copy_row(item, "  ") for item in made if item.model == model.origin]
    here = {model.origin for model in models}
    rows += [_copy_row(item, "") for item in made if item.model not in here]
    show_table(session, ("MODEL", "SIZE", "SOURCE", "REVISION", "STATE"), rows)


def _show_catalog(session: Session, as_json: bool) -> None:
    from llmrun.cli.model_json import entry_json
    from llmrun.cli.tables import show_json, show_table
    from llmrun.store import catalog

    known = catalog.load()
    if as_json:
        entries = [entry_json(entry) for entry in known.entries.values()]
        show_json(session, {"default": known.default, "models": entries})
        return
    rows = [
        (
            entry.alias + (" *" if entry.alias == known.default else ""),
            f"{entry.parameters / 1e9:.2f} B",
            entry.quant,
            size(entry.memory_bytes),
            f"{entry.context:,}",
            entry.license + (" (accept on the hub)" if entry.gated else ""),
        )
        for entry in known.entries.values()
    ]
    show_table(session, ("NAME", "WEIGHTS", "SCHEME", "MEMORY", "CONTEXT", "LICENSE"), rows)
    session.say("* is used when no model is named.")


def _copy_row(item: "Derived", indent: str) -> tuple[str, ...]:
    """A quantized copy, below its model where that is here."""
    state = _state(item.problem)
    return (f"{indent}{item.recipe}", size(item.bytes), f"made from {item.model}", "", state)


def _state(problem: str | None) -> str:
    return "ok" if problem is None else f"damaged: {problem}"
