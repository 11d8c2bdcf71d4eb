"""What the store hands out: a model whose files are on this machine."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileRecord:
    """One file, by its path relative to the model's folder.

    ``sha256`` is None for a folder or file of the user's that is used in place: nobody hashed it.
    """

    path: str
    size: int
    sha256: str | None


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    ``source``: pypi, hub, folder or gguf. ``origin``: where it came from (``org/name``, package
    and version, or the path). ``path``: the folder, or the one ``.gguf`` file. ``problem``: None
    for a usable model, else what is wrong with its files, in words.
    """

    name: str
    source: str
    origin: str
    revision: str | None
    path: Path
    files: tuple[FileRecord, ...]
    bytes: int
    license: str | None = None
    alias: str | None = None
    problem: str | None = None
