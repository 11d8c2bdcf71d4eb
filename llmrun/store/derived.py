"""Derived artefacts: what names them, and how they are listed."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.store import manifest as manifests
from llmrun.store import names
from llmrun.store.manifest import UnreadableManifestError
from llmrun.store.model import LocalModel


@dataclass(frozen=True)
class Key:
    """What an artefact is made of: a source model (its origin), its exact files, and the recipe.

    ``recipe`` names everything that changes the result: scheme, group, calibration, version.
    """

    model: str
    parent: str
    recipe: str

    @property
    def folder(self) -> str:
        """The folder name below ``derived/``."""
        return names.slug("\n".join((self.model, self.recipe, self.parent)))


@dataclass(frozen=True)
class Derived:
    """An artefact for listing; ``problem`` is None if it is whole, ``bytes`` what it takes."""

    model: str
    recipe: str
    parent: str
    path: Path
    bytes: int
    problem: str | None = None


def key_for(model: LocalModel, recipe: str) -> Key:
    """The key of an artefact made from ``model``.

    Files of the user's, which nobody hashed, are told apart by size and modification time.
    """
    folder = model.path if model.path.is_dir() else model.path.parent
    parts = []
    for record in model.files:
        digest = record.sha256
        if digest is None:
            digest = str((folder / record.path).stat().st_mtime_ns)
        parts.append(f"{record.path}:{record.size}:{digest}")
    parent = hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()
    return Key(model=model.origin, parent=parent, recipe=recipe)


def read_all(folder: Path) -> Iterator[Derived]:
    """Every artefact below ``folder``, damaged ones included."""
    for path in sorted(folder.glob("*")):
        size = bytes_below(path)
        try:
            made = manifests.read(path)
        except (UnreadableManifestError, ModelFileError) as err:
            yield Derived(path.name, "", "", path, size, str(err).partition("\n")[0])
            continue
        problem = manifests.damage(path, made)
        yield Derived(made.origin, made.recipe or "", made.parent or "", path, size, problem)


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
