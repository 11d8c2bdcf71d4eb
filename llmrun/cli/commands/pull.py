"""``llmrun pull``: bring a model to this machine."""

from typing import Annotated

import typer

from llmrun.cli.options import (
    GeneralOptions,
    Json,
    ModelArgument,
    ModelOption,
    Revision,
    spread,
    the_model,
)
from llmrun.cli.session import Session
from llmrun.cli.units import size


@spread
def command(
    context: typer.Context,
    named: ModelArgument = None,
    *,
    revision: Revision = None,
    update: Annotated[
        bool, typer.Option("--update", help="Ask the hub what the branch means today.")
    ] = False,
    model: ModelOption = None,
    as_json: Json = False,
    general: GeneralOptions,
) -> None:
    """Download a model, verified, into the store."""
    from llmrun.cli import fetching
    from llmrun.cli.model_json import local_json
    from llmrun.cli.progress import for_session
    from llmrun.cli.tables import show_json

    session: Session = context.obj.with_options(general)
    name = the_model(named, model)
    local = fetching.fetch_model(
        name, session.settings, for_session(session), revision, update=update
    )
    if as_json:
        show_json(session, local_json(local))
        return
    at = f" at {local.revision[:12]}" if local.revision else ""
    session.say(f"{local.name}{at}: {size(local.bytes)} in {local.path}")
