"""From a model's name to its verified files on this machine, and what the catalog says of it."""

from dataclasses import replace

from llmrun.cli.settings import Settings
from llmrun.store import catalog
from llmrun.store.fetch import fetch
from llmrun.store.model import LocalModel
from llmrun.store.progress import Progress
from llmrun.store.reference import resolve
from llmrun.store.store import Store


def fetch_model(
    name: str,
    settings: Settings,
    progress: Progress,
    revision: str | None = None,
    *,
    update: bool = False,
) -> LocalModel:
    """Resolve a name and bring the model here if it is not; see ``store.fetch``."""
    reference = resolve(name, catalog.load(), revision)
    wanted = replace(settings.fetch_settings(), update=update)
    return fetch(reference, Store(settings.store_root), wanted, progress)


def recommended_scheme(local: LocalModel) -> str | None:
    """The catalog's scheme for a model, None if it is not in the catalog."""
    entry = catalog.load().entries.get(local.alias) if local.alias else None
    return entry.quant if entry else None
