"""What a typed model name means: an alias, a hub id, a folder or a ``.gguf`` file. No network.

Order: an alias of the catalog; a folder or ``.gguf`` file that exists; ``org/name``, optionally
with ``@revision`` and with one file, ``org/name/FILE.gguf`` or ``org/name/FOLDER/FILE.gguf``. Write
``./name`` for a folder that shares its name with an alias.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelFileError, ModelNotFoundError, UsageError
from llmrun.store import names
from llmrun.store.catalog import Catalog, CatalogEntry

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Reference:
    """A resolved name. ``kind``: pypi, hub, folder or gguf.

    ``revision`` is what was asked for (branch, tag or commit) or the catalog's pin, None for the
    default branch; ``file`` the one GGUF file wanted from a hub repository, with its folders, the
    first part of a split model; ``path`` is set for folder and gguf.
    """

    name: str
    kind: str
    entry: CatalogEntry | None = None
    repo: str | None = None
    revision: str | None = None
    path: Path | None = None
    file: str | None = None

    @property
    def pinned(self) -> CatalogEntry | None:
        """The catalog entry, if its pins hold for the revision asked for."""
        if self.entry and self.kind == "hub" and self.revision != self.entry.revision:
            return None
        return self.entry


def resolve(name: str, catalog: Catalog, revision: str | None = None) -> Reference:
    """Say what ``name`` means. ModelNotFoundError if nothing; UsageError for a bad revision."""
    if revision is not None and not names.is_revision(revision):
        raise UsageError(
            f"{_shown(revision)} is not a revision.", "Give a branch, a tag or a full commit."
        )
    entry = catalog.entries.get(name)
    if entry:
        return _of_entry(name, entry, revision)
    local = _local(name)
    if local:
        if revision is not None:
            raise UsageError(f"{name} is on this machine and has no revisions.", "Drop --revision.")
        return local
    return _of_hub(name, catalog, revision)


def _of_entry(name: str, entry: CatalogEntry, revision: str | None) -> Reference:
    if entry.source == "pypi":
        if revision is not None:
            raise UsageError(
                f"{name} comes from the package {entry.package} {entry.version}, pinned by hash; "
                "it has no other revisions.",
                "Drop --revision.",
            )
        return Reference(name=name, kind="pypi", entry=entry)
    ggufs = [pin.path for pin in entry.files if pin.path.endswith(".gguf")]
    return Reference(
        name=name,
        kind="hub",
        entry=entry,
        repo=entry.repo,
        revision=revision or entry.revision,
        file=ggufs[0] if ggufs else None,
    )


def _local(name: str) -> Reference | None:
    if not name or "\0" in name:
        return None
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return Reference(name=name, kind="folder", path=path.absolute())
        exists = path.is_file()
    except (OSError, RuntimeError):  # a name too long for a path, or a home nobody has
        return None
    if exists and path.suffix == ".gguf":
        return Reference(name=name, kind="gguf", path=path.absolute())
    if exists and path.suffix in PICKLES:
        raise _pickle(name)
    return None


def _of_hub(name: str, catalog: Catalog, revision: str | None) -> Reference:
    base, at, typed = name.partition("@")
    if at and not names.is_revision(typed):
        raise UsageError(
            f"{_shown(typed)} is not a revision.", "Write org/name@branch, @tag or @commit."
        )
    if at and revision is not None and typed != revision:
        raise UsageError(f"{_shown(name)} and --revision {revision} disagree.", "Keep one of them.")
    parts = base.split("/")
    repo, inside = "/".join(parts[:2]), "/".join(parts[2:])
    if inside.endswith(PICKLES):
        raise _pickle(name)
    if inside.endswith(".gguf") and names.is_file_in_folders(inside):
        file: str | None = names.first_part_of(inside)
    elif len(parts) == 2:
        file = None
    else:
        raise _unknown(name, catalog)
    if not names.is_repo(repo):
        raise _unknown(name, catalog)
    return Reference(
        name=name, kind="hub", repo=repo, revision=revision or typed or None, file=file
    )


def _pickle(name: str) -> ModelFileError:
    return ModelFileError(
        f"{_shown(name)} is a pickle, which can run code when it is opened; "
        "llmrun never reads one.",
        "Use a version of the model in safetensors or GGUF.",
    )


def _unknown(name: str, catalog: Catalog) -> ModelNotFoundError:
    near = difflib.get_close_matches(name.lower(), list(catalog.entries), n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(near)}? " if near else ""
    return ModelNotFoundError(
        f"{_shown(name)} is no known alias, hub id (org/name), folder or .gguf file.",
        f"{hint}`llmrun list --catalog` shows the aliases, `llmrun list` what is here.",
    )


def _shown(name: str) -> str:
    """The name as it may go to a terminal: escapes instead of control characters, not endless."""
    return ascii(name if len(name) <= 120 else name[:117] + "...")
