"""``manifest.json``: what a published folder holds, written last and checked before every use.

A folder without a readable manifest, or whose files have other sizes, counts as absent and is
made again. A manifest of a newer format is refused by name, never guessed at.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmrun.errors import ModelFileError
from llmrun.store import names
from llmrun.store.disk import Disk
from llmrun.store.model import FileRecord

NAME = "manifest.json"
FORMAT = 1
MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``.

    ``kind``: model or derived. ``opens``: the file to open, empty for the folder itself.
    ``recipe`` and ``parent`` (a fingerprint of the source's files) are set for derived artefacts.
    """

    kind: str
    source: str
    origin: str
    revision: str
    opens: str
    files: tuple[FileRecord, ...]
    alias: str | None = None
    license: str | None = None
    recipe: str | None = None
    parent: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class UnreadableManifestError(Exception):
    """The manifest is missing or damaged; its folder counts as absent."""


def write(disk: Disk, folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder, durable when this returns."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)
    disk.remove_file(folder / NAME)
    with disk.create(folder / NAME) as file:
        disk.write(file, text.encode())
        disk.sync(file)


def read(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    UnreadableManifestError if there is none to trust; ModelFileError if a newer llmrun wrote it.
    """
    try:
        with (folder / NAME).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        document: dict[str, Any] = json.loads(text if len(text) <= MAX_BYTES else b"")
        format_version = document["format"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as err:
        raise UnreadableManifestError(f"{NAME} is missing or damaged") from err
    if not isinstance(format_version, int):
        raise UnreadableManifestError(f"{NAME} is damaged")
    if format_version > FORMAT:
        raise ModelFileError(
            f"{folder} was written by a newer llmrun (store format {format_version}, "
            f"this one reads up to {FORMAT}).",
            "Update llmrun, or remove the model and pull it again.",
        )
    try:
        return _parse(document)
    except (TypeError, KeyError, ValueError) as err:
        raise UnreadableManifestError(f"{NAME} is damaged: {err}") from err


def damage(folder: Path, manifest: Manifest) -> str | None:
    """The first file that is missing or has another size than recorded; None if all are there."""
    for record in manifest.files:
        path = folder / record.path
        if path.is_symlink() or not path.is_file():
            return f"{record.path} is missing"
        if path.stat().st_size != record.size:
            return f"{record.path} has {path.stat().st_size} bytes instead of {record.size}"
    return None


def is_complete(folder: Path) -> bool:
    """Whether a folder is published and whole, by its manifest and sizes."""
    try:
        return damage(folder, read(folder)) is None
    except UnreadableManifestError:
        return False


def _parse(document: dict[str, Any]) -> Manifest:
    fields = {key: value for key, value in document.items() if key not in ("format", "files")}
    for key, value in fields.items():
        optional = key in ("alias", "license", "recipe", "parent")
        if not isinstance(value, str) and not (optional and value is None):
            raise ValueError(f"{key} is not text")
    files = tuple(FileRecord(**row) for row in document["files"])
    for record in files:
        if (
            not isinstance(record.path, str)
            or names.leaves_folder(record.path)
            or not isinstance(record.size, int)
            or not isinstance(record.sha256, str)
            or not names.is_sha256(record.sha256)
        ):
            raise ValueError(f"{record.path!r} is not a valid file record")
    manifest = Manifest(**fields, files=files)
    if manifest.opens and manifest.opens not in [record.path for record in files]:
        raise ValueError(f"{manifest.opens!r} is not one of its files")
    return manifest
