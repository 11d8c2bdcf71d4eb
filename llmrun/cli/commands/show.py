"""``llmrun show``: what is known about one model."""

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from llmrun.errors import ModelFileError

if TYPE_CHECKING:
    from llmrun.formats.checkpoint import Checkpoint
    from llmrun.store.model import LocalModel
    from llmrun.store.reference import Reference

_CONFIG_KEYS = (
    ("architecture", "model_type", "general.architecture"),
    ("layers", "num_hidden_layers", "{}.block_count"),
    ("hidden size", "hidden_size", "{}.embedding_length"),
    ("heads", "num_attention_heads", "{}.attention.head_count"),
    ("key/value heads", "num_key_value_heads", "{}.attention.head_count_kv"),
    ("context", "max_position_embeddings", "{}.context_length"),
    ("vocabulary", "vocab_size", "{}.vocab_size"),
)
"""What is told of a config: a title, the key in config.json, the key in a GGUF."""


@spread
def command(
    context: typer.Context,
    named: ModelArgument = None,
    *,
    revision: Revision = None,
    model: ModelOption = None,
    as_json: Json = False,
    general: GeneralOptions,
) -> None:
    """Show one model: files, config, bits per weight."""
    from llmrun.cli.tables import show_json, show_pairs
    from llmrun.store import catalog, reference, source
    from llmrun.store.store import Store

    session: Session = context.obj.with_options(general)
    name = the_model(named, model)
    meant = reference.resolve(name, catalog.load(), revision)
    local = source.source_for(meant).present(meant, Store(session.settings.store_root))
    document = _document(meant, local)
    if as_json:
        show_json(session, document)
    else:
        show_pairs(session, list(_lines(meant, local, document)))


def _document(meant: "Reference", local: "LocalModel | None") -> dict[str, Any]:
    from llmrun.cli.model_json import entry_json, local_json

    document: dict[str, Any] = {
        "name": meant.name,
        "catalog": entry_json(meant.entry) if meant.entry else None,
        "local": local_json(local) if local else None,
        "refused": None,
        "weights": None,
        "config": None,
    }
    if local is not None and local.problem is None:
        from llmrun.formats.open import open_checkpoint

        checkpoint = open_checkpoint(local.path)
        document["refused"] = _why_refused(local.path)
        document["weights"] = _weights(checkpoint)
        document["config"] = _config(checkpoint)
    return document


def _why_refused(path: Path) -> str | None:
    """Why a model whose files are readable would not be loaded; None if it would."""
    from llmrun.cli.source import open_source

    try:
        open_source(path)
    except ModelFileError as error:
        return error.what
    return None


def _weights(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Counted from the headers: no tensor is read."""
    tensors = checkpoint.tensors.values()
    n_weights = sum(math.prod(tensor.shape) for tensor in tensors)
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    return {
        "parameters": n_weights,
        "bytes": n_bytes,
        "bits_per_weight": 8 * n_bytes / n_weights if n_weights else None,
        "tensors_by_kind": dict(sorted(Counter(tensor.kind for tensor in tensors).items())),
        "quantization": checkpoint.quantization,
    }


def _config(checkpoint: "Checkpoint") -> dict[str, object]:
    config = checkpoint.config
    is_gguf = checkpoint.layout == "gguf"
    family = config.get("general.architecture")
    keys = {title: ggml.format(family) if is_gguf else hub for title, hub, ggml in _CONFIG_KEYS}
    return {title: config[key] for title, key in keys.items() if key in config}


def _state(local: "LocalModel", refused: str | None) -> str:
    if local.problem is not None:
        return f"damaged: {local.problem}"
    return "ok" if refused is None else f"cannot be loaded: {refused}"


def _lines(
    meant: "Reference", local: "LocalModel | None", document: dict[str, Any]
) -> list[tuple[str, str]]:
    lines = [("name", meant.name)]
    if entry := meant.entry:
        lines += [
            ("title", entry.name),
            ("license", entry.license),
            ("recommended", f"{entry.quant}, about {size(entry.memory_bytes)} of memory"),
        ]
    if local is None:
        return [*lines, ("on this machine", f"no; `llmrun pull {meant.name}` gets it")]
    lines += [
        ("source", f"{local.source} {local.origin}"),
        ("revision", local.revision or "none"),
        ("path", str(local.path)),
        ("state", _state(local, document["refused"])),
    ]
    lines += [("file", f"{file.path}  {size(file.size)}") for file in local.files]
    if config := document["config"]:
        lines += [(title, str(value)) for title, value in config.items()]
    if weights := document["weights"]:
        kinds = ", ".join(f"{n} x {kind}" for kind, n in weights["tensors_by_kind"].items())
        lines += [
            ("weights", f"{weights['parameters']:,} in {size(weights['bytes'])}"),
            ("bits per weight", f"{weights['bits_per_weight']:.2f} (all tensors, scales included)"),
            ("tensors", kinds),
            ("quantized", weights["quantization"] or "no"),
        ]
    return lines
