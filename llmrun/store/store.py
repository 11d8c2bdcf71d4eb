"""The model store: published models and derived artefacts below one folder (layout.py).

Whatever is found here is complete: sizes and manifest are checked at every look, hashes were
checked before the files got their names. Any number of stores, in any number of processes, may
share a root; no reader ever sees half a folder, and a killed process leaves nothing to clean up.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import InternalError, ModelFileError, ModelNotFoundError, UsageError
from llmrun.store import layout
from llmrun.store import manifest as manifests
from llmrun.store.claim import Claim
from llmrun.store.derived import Derived, Key, bytes_below, key_for, read_all
from llmrun.store.disk import Disk, sha256_of
from llmrun.store.manifest import Manifest, UnreadableManifestError
from llmrun.store.model import FileRecord, LocalModel
from llmrun.store.reference import Reference
from llmrun.store.workspace import discard, dropped_on_error, publish, work

ABBREVIATED_COMMIT = re.compile(r"[0-9a-f]{7,40}")
"""What may stand for a whole commit."""

Write = Callable[[Path], Mapping[str, str] | None]
"""Fills a folder; may return the sha256 of files by their path in it."""


@dataclass(frozen=True)
class Removed:
    """A folder that was deleted."""

    name: str
    path: Path
    bytes: int


class Store:
    """One store; ``root`` is created when something is written."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.disk = disk or Disk()
        self.staging = root / layout.STAGING

    def find(self, reference: Reference) -> LocalModel | None:
        """The model a hub or pypi reference means, if it is here and whole. No network.

        ModelFileError if a newer llmrun wrote it.
        """
        model = self.inspect(reference)
        return model if model and model.problem is None else None

    def inspect(self, reference: Reference) -> LocalModel | None:
        """As ``find``, but a damaged model is returned too, with ``problem`` set."""
        revision = layout.pinned_revision(self.root, reference)
        folder = layout.model_folder(self.root, reference) / (revision or "none")
        if revision is None or not folder.is_dir():
            return None
        alias = reference.entry.alias if reference.entry else None
        return _read(folder, alias or layout.origin(reference), alias)

    def models(self) -> list[LocalModel]:
        """Every model of the store by name, damaged ones with their ``problem``."""
        found = []
        for folder in (self.root / layout.MODELS).glob("*/*"):
            if not folder.is_dir():
                continue
            try:
                found.append(_read(folder, None, None))
            except ModelFileError as err:
                found.append(_broken(folder, None, err.what))
        return sorted(found, key=lambda model: (model.name, model.revision or ""))

    def derived(self) -> list[Derived]:
        """Every derived artefact, damaged ones with their ``problem``."""
        return list(read_all(self.root / layout.DERIVED))

    def remove(self, name: str | Reference) -> list[Removed]:
        """Delete a model, damaged or not, and what was derived from it; says what went.

        A string means what ``models()`` calls it: name, alias or origin, with ``@revision`` for
        one of several: a revision, the branch or tag it was pulled as, or 7 or more digits of a
        commit. ModelNotFoundError if there is no such model, UsageError if digits fit several.
        """
        models = self._named(name) if isinstance(name, str) else self._referred(name)
        parents = {key_for(model, "").parent for model in models if model.files}
        made = [item for item in self.derived() if item.parent in parents or item.model == name]
        if not models and not made:
            shown = name if isinstance(name, str) else name.name
            raise ModelNotFoundError(f"{shown!r} is not in the store.", "See `llmrun list`.")
        removed = [Removed(m.name, _folder(m), bytes_below(_folder(m))) for m in models]
        removed += [Removed(f"{d.model} {d.recipe}", d.path, d.bytes) for d in made]
        try:
            for item in removed:
                discard(self.disk, self.staging, item.path)
                layout.forget(self.disk, item.path)
        except OSError as err:
            raise self._unwritable(err) from err
        return removed

    def has(self, key: Key) -> bool:
        """Whether a derived artefact is here whole."""
        return manifests.is_complete(self.folder(key))

    def folder(self, key: Key) -> Path:
        """Where a derived artefact is, or would be."""
        return self.root / layout.DERIVED / key.folder

    def ensure(
        self,
        key: Key,
        write: Write,
        *,
        lock_timeout_s: float = 1800.0,
        on_wait: Callable[[Claim], None] = lambda claim: None,
    ) -> Path:
        """The folder of a derived artefact, made by ``write(folder)`` if it is not here whole.

        ``write`` fills a private folder, which is empty or holds what a call for the same key
        left when it was killed or interrupted, and must have checked what it wrote; an error of
        it leaves nothing behind. It may return hashes of files, which are then not taken again.
        InternalError if a write fails. Processes that want the same artefact wait for the first
        (``on_wait`` is called while they do).
        """
        target = self.folder(key)
        if manifests.is_complete(target):
            return target
        try:
            with work(
                self.disk,
                self.staging,
                "make",
                key.folder,
                timeout_s=lock_timeout_s,
                is_done=lambda: manifests.is_complete(target),
                on_wait=on_wait,
            ) as claim:
                if claim:
                    with dropped_on_error(self.disk, claim.path):
                        self._make(key, write, claim.path, target)
        except InterruptedError:
            raise  # somebody wants to stop, the disk is well
        except OSError as err:
            raise self._unwritable(err) from err
        return target

    def _make(self, key: Key, write: Write, folder: Path, target: Path) -> None:
        self.disk.remove_file(folder / manifests.NAME)  # of one that was about to be published
        hashes = write(folder) or {}
        self.publish(folder, target, _derived(key, self._settle(folder, hashes)))

    def publish(self, folder: Path, target: Path, manifest: Manifest) -> None:
        """Give a finished folder its final name (workspace.py)."""
        publish(self.disk, self.staging, folder, target, manifest)

    def _unwritable(self, err: OSError) -> InternalError:
        return InternalError(
            f"The store {self.root} cannot be written: {err.strerror or err}. "
            "What was there before is unchanged.",
            "Free some space or correct its permissions, then run the command again.",
        )

    def _settle(self, folder: Path, hashes: Mapping[str, str]) -> tuple[FileRecord, ...]:
        """Make all files of a folder durable; read those back whose hash is not known."""
        records = []
        for path in sorted(folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                self.disk.sync_folder(path)
                continue
            if path.is_symlink():
                raise InternalError(f"{path.name}, made for the store, is a link.")
            self.disk.sync_file(path)
            relative = path.relative_to(folder).as_posix()
            digest = hashes.get(relative) or sha256_of(path)
            records.append(FileRecord(relative, path.stat().st_size, digest))
        if not records:
            raise InternalError("A derived artefact was made without any file.")
        return tuple(records)

    def _referred(self, reference: Reference) -> list[LocalModel]:
        revision = layout.pinned_revision(self.root, reference) if reference.revision else None
        home = layout.model_folder(self.root, reference)
        return [
            model
            for model in self.models()
            if _folder(model).parent == home and revision in (None, _folder(model).name)
        ]

    def _named(self, name: str) -> list[LocalModel]:
        base, at, revision = name.partition("@")
        models = [
            model
            for model in self.models()
            if base in (model.name, model.alias, model.origin, _folder(model).parent.name)
        ]
        if not at:
            return models
        exact = [
            model
            for model in models
            if _folder(model).name in (revision, self._pulled_as(model, revision))
        ]
        if exact or not ABBREVIATED_COMMIT.fullmatch(revision):
            return exact
        fitting = [model for model in models if _folder(model).name.startswith(revision)]
        if len(fitting) > 1:
            raise UsageError(
                f"{name!r} fits several revisions: {_revisions(fitting)}.", "Give more."
            )
        return fitting

    def _pulled_as(self, model: LocalModel, branch: str) -> str | None:
        """The commit a branch or tag of a hub model meant when it was last pulled."""
        if model.source != "hub" or not branch:
            return None
        parts = model.origin.split("/")
        reference = Reference(
            name=model.origin,
            kind="hub",
            repo="/".join(parts[:2]),
            revision=branch,
            file="/".join(parts[2:]) or None,
        )
        return layout.pinned_revision(self.root, reference)


def _read(folder: Path, name: str | None, alias: str | None) -> LocalModel:
    try:
        held = manifests.read(folder)
    except UnreadableManifestError as err:
        return _broken(folder, name, str(err))
    alias = alias or held.alias
    return LocalModel(
        name=name or alias or held.origin,
        source=held.source,
        origin=held.origin,
        revision=held.revision,
        path=folder / held.opens,
        files=held.files,
        bytes=held.size,
        license=held.license,
        alias=alias,
        problem=manifests.damage(folder, held),
    )


def _broken(folder: Path, name: str | None, problem: str) -> LocalModel:
    return LocalModel(
        name=name or folder.parent.name,
        source="unknown",
        origin=folder.parent.name,
        revision=folder.name,
        path=folder,
        files=(),
        bytes=bytes_below(folder),
        problem=problem,
    )


def _revisions(models: Sequence[LocalModel]) -> str:
    return ", ".join(_folder(model).name[:12] for model in models)


def _folder(model: LocalModel) -> Path:
    """The published folder of a model of the store; ``path`` may be its one file, even missing."""
    single = bool(model.files) and model.path.name in [record.path for record in model.files]
    return model.path.parent if single else model.path


def _derived(key: Key, files: tuple[FileRecord, ...]) -> Manifest:
    return Manifest(
        kind="derived",
        source="derived",
        origin=key.model,
        revision=key.parent,
        opens="",
        files=files,
        recipe=key.recipe,
        parent=key.parent,
    )
