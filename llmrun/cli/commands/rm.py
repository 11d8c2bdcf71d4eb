"""``llmrun rm``: delete a model from the store."""

import typer

from llmrun.cli.options import GeneralOptions, Json, ModelArgument, ModelOption, spread, the_model
from llmrun.cli.session import Session
from llmrun.cli.units import size


@spread
def command(
    context: typer.Context,
    named: ModelArgument = None,
    *,
    model: ModelOption = None,
    as_json: Json = False,
    general: GeneralOptions,
) -> None:
    """Delete a model and its quantized copies."""
    from llmrun.cli.tables import show_json
    from llmrun.store.store import Store

    session: Session = context.obj.with_options(general)
    name = the_model(named, model)
    removed = Store(session.settings.store_root).remove(name)
    total = sum(item.bytes for item in removed)
    if as_json:
        items = [{"name": i.name, "path": str(i.path), "bytes": i.bytes} for i in removed]
        show_json(session, {"removed": items, "bytes": total})
        return
    for item in removed:
        session.say(f"removed {item.name}: {size(item.bytes)} ({item.path})")
    session.say(f"{size(total)} ({total:,} bytes) freed")
