"""How a damaged or unsupported model file is reported: one wording, one class, one exit code.

Names that come from a file are shown through ``shown``: quoted, cut, and free of control
characters.
"""

from pathlib import Path

from llmrun.errors import ModelFileError

FETCH_AGAIN = "Fetch the model again with `llmrun pull`, or use another copy of it."


def damaged(path: Path, what: str, next_step: str = FETCH_AGAIN) -> ModelFileError:
    """Return the error for a file that does not say what it should."""
    return ModelFileError(f"{shown(path.name)}: {what}.", next_step)


def shown(name: object, most: int = 96) -> str:
    """Return a name from a model file in a form that is safe to print."""
    text = ascii(name)
    return text if len(text) <= most else f"{text[:most]}..."


PICKLES = frozenset((".bin", ".pt", ".pth", ".ckpt", ".pkl"))
"""Endings of files that run code when they are loaded; llmrun never opens them."""


def pickled(path: Path) -> ModelFileError:
    """Return the error for a model that exists as pickles only."""
    return ModelFileError(
        f"{path} holds its weights as pickles ({', '.join(sorted(PICKLES))}), which can run code "
        "when they are loaded. llmrun never reads them.",
        "Use a safetensors version of this model.",
    )
