"""Models of the store and the catalog as JSON; the keys are an interface."""

from dataclasses import asdict

from llmrun.store.catalog import CatalogEntry
from llmrun.store.derived import Derived
from llmrun.store.model import LocalModel

Json = dict[str, object]


def local_json(local: LocalModel) -> Json:
    """A model on this machine."""
    return {**asdict(local), "path": str(local.path), "files": [asdict(f) for f in local.files]}


def derived_json(made: Derived) -> Json:
    """A quantized copy in the store."""
    return {
        "model": made.model,
        "recipe": made.recipe,
        "path": str(made.path),
        "bytes": made.bytes,
        "problem": made.problem,
    }


def entry_json(entry: CatalogEntry) -> Json:
    """A model of the catalog; the fields of the other source are left out."""
    filled = {key: value for key, value in asdict(entry).items() if value not in ("", 0, ())}
    return {**filled, "gated": entry.gated}
