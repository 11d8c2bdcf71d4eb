"""Open whatever the user gave: the format is found by looking, never by guessing from a name.

Formats are the modules of this package that export ``FORMAT``; adding one is adding a file.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import llmrun.formats
from llmrun.errors import InternalError, LlmrunError, ModelFileError, ModelNotFoundError
from llmrun.formats.checkpoint import Checkpoint, Format
from llmrun.formats.damage import PICKLES, pickled, shown
from llmrun.formats.gguf_split import is_later_part
from llmrun.formats.safetensors import CONFIG_NAME, quantization_config


def open_checkpoint(path: Path, *, exact: bool = False) -> Checkpoint:
    """Open a model's folder or a GGUF file; reads headers only. ``exact``: nothing is rounded.

    Raises ModelNotFoundError if the path does not exist, ModelFileError if it holds no model
    llmrun can read or its headers are damaged.
    """
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist.", "Check the path or the model's name.")
    for format in _walk(first=path.suffix.removeprefix(".").lower()):
        if format.detect(path):
            return format.open_exact(path) if exact and format.open_exact else format.open(path)
    raise _unknown_folder(path, known_formats()) if path.is_dir() else _unknown_file(path)


def known_formats() -> dict[str, Format]:
    """Return every checkpoint format by name."""
    formats: dict[str, Format] = {}
    for format in _walk():
        if format.name in formats:
            raise InternalError(f"Two checkpoint formats are named {format.name}.")
        formats[format.name] = format
    return formats


def _walk(first: str = "") -> Iterator[Format]:
    """Formats, each imported when it is asked for; the one of the module ``first`` before all."""
    modules = [module.name for module in pkgutil.iter_modules(llmrun.formats.__path__)]
    for name in sorted(modules, key=lambda name: name != first):
        format = getattr(importlib.import_module(f"llmrun.formats.{name}"), "FORMAT", None)
        if format is not None:
            yield format


def _unknown_folder(folder: Path, formats: dict[str, Format]) -> LlmrunError:
    if (folder / CONFIG_NAME).exists():
        method = (quantization_config(folder) or {}).get("quant_method")
        return ModelFileError(
            f"{folder}: config.json says the model is quantized as {shown(method)}, "
            f"which llmrun does not read. Known: {', '.join(sorted(formats))}.",
            "Use the unquantized model and let llmrun quantize it (-q int4).",
        )
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return ModelFileError(f"{folder} is empty.", "Fetch the model with `llmrun pull`.")
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        whole_or_first = [name for name in ggufs if not is_later_part(name)] or ggufs
        return ModelFileError(
            f"{folder} has no config.json, but GGUF files.",
            f"Name one of them: {', '.join(str(folder / name) for name in whole_or_first[:4])}.",
        )
    if any(Path(name).suffix in PICKLES for name in names):
        return pickled(folder)
    return ModelFileError(
        f"{folder} has no config.json, so it is no model folder.",
        "Give the folder that holds config.json and the safetensors files, or a .gguf file.",
    )


def _unknown_file(path: Path) -> LlmrunError:
    if path.suffix in PICKLES:
        return pickled(path)
    if path.suffix == ".safetensors":
        return ModelFileError(
            f"{path} is one file of a model, which needs its config.json too.",
            f"Give its folder: {path.parent}.",
        )
    return ModelFileError(
        f"{path} is no model file llmrun knows.", "Give a model's folder or a .gguf file."
    )
