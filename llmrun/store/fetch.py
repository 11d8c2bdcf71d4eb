"""From a reference to a complete model on this machine.

What is complete is returned without touching the network. Anything else is pinned to one
revision, checked against the free space, brought into a private folder, verified, and published
in one step. A second process waits for the first and uses its files.
"""

from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import DownloadError, ModelFileError, ModelNotFoundError
from llmrun.store import layout
from llmrun.store import manifest as manifests
from llmrun.store.derived import bytes_below
from llmrun.store.disk import is_full
from llmrun.store.manifest import Manifest
from llmrun.store.model import LocalModel
from llmrun.store.names import slug
from llmrun.store.progress import Progress
from llmrun.store.reference import Reference
from llmrun.store.settings import FetchSettings as FetchSettings
from llmrun.store.source import Listing, Source, source_for
from llmrun.store.store import Store
from llmrun.store.waiting import Waiting
from llmrun.store.workspace import work

MARGIN = 0.05  # of the needed space, for what file systems add and others write meanwhile


def fetch(
    reference: Reference, store: Store, settings: FetchSettings, progress: Progress
) -> LocalModel:
    """Return the model ``reference`` means, downloading it if it is not complete here.

    With ``settings.update`` the hub is asked anew which commit a branch or tag means.
    ModelNotFoundError if it exists nowhere or is missing while offline; DownloadError for
    anything that stops the transfer; ModelFileError for damage that only a download could mend.
    """
    source = source_for(reference)
    model = source.present(reference, store)
    if model and model.problem is None and not settings.update:
        return model
    if settings.offline:
        raise _unavailable(reference, model)
    return _pull(_Task(source, reference, store, settings, progress))


@dataclass(frozen=True)
class _Task:
    """One pull: what from where into which store, how, and who watches."""

    source: Source
    reference: Reference
    store: Store
    settings: FetchSettings
    progress: Progress


def _pull(task: _Task) -> LocalModel:
    reference, store = task.reference, task.store
    listing = task.source.resolve(reference, task.settings)
    target = layout.model_folder(store.root, reference) / listing.revision
    waiting = Waiting(task.progress, listing.size)
    try:
        store.disk.make_folders(store.root)
        with work(
            store.disk,
            store.staging,
            "pull",
            slug(f"{target.parent.name} {target.name}"),
            timeout_s=task.settings.lock_timeout_s,
            is_done=lambda: manifests.is_complete(target),
            on_wait=waiting.look,
        ) as claim:
            waiting.end()
            if claim:
                _fill(task, listing, claim.path, target)
        layout.remember(store.disk, store.root, reference, listing.revision)
    except OSError as err:
        raise DownloadError(
            f"The store {store.root} cannot be written: {err.strerror or err}. "
            "What was there before is unchanged.",
            "Free some space or correct its permissions, then run the command again.",
        ) from err
    finally:
        waiting.end()
    model = store.find(reference)
    if model is None:
        raise DownloadError(
            f"{reference.name} was removed while it was being pulled.", "Run the command again."
        )
    return model


def _fill(task: _Task, listing: Listing, folder: Path, target: Path) -> None:
    """Bring the files of a listing into a private folder and publish it as ``target``."""
    reference, store = task.reference, task.store
    entry = reference.entry
    try:
        _salvage(store, listing, target, folder)
        _check_space(task, listing, folder)
        files = task.source.download(
            reference, listing, folder, task.settings, task.progress, store.disk
        )
        pulled = Manifest(
            kind="model",
            source=reference.kind,
            origin=layout.origin(reference),
            revision=listing.revision,
            opens=listing.opens,
            files=files,
            alias=entry.alias if entry else None,
            license=entry.license if entry else listing.license,
        )
        store.publish(folder, target, pulled)
    except OSError as err:
        if is_full(err):
            store.disk.remove_tree(folder)
        raise


def _salvage(store: Store, listing: Listing, target: Path, folder: Path) -> None:
    """Take over what a damaged copy still holds; the download verifies it like anything else."""
    for wanted in listing.files:
        old, new = target / wanted.path, folder / wanted.path
        if old.is_file() and old.stat().st_size == wanted.size and not new.exists():
            store.disk.link(old, new)


def _check_space(task: _Task, listing: Listing, folder: Path) -> None:
    reference, store = task.reference, task.store
    missing = max(0, listing.size - bytes_below(folder)) + listing.extra_bytes
    needed = int((missing + task.settings.reserve_bytes) * (1 + MARGIN))
    free = store.disk.free_bytes(store.root)
    if missing and needed > free:
        raise DownloadError(
            f"{reference.name} needs {needed:,} bytes, but the disk of {store.root} has "
            f"{free:,} free.",
            "Free some space, remove models you do not need, or put the store on another disk.",
        )


def _unavailable(
    reference: Reference, model: LocalModel | None
) -> ModelNotFoundError | ModelFileError:
    again = f"Without --offline, `llmrun pull {reference.name}` "
    if model and model.problem is None:
        return ModelNotFoundError(
            f"{reference.name} is here, but --update needs the network, and llmrun is offline.",
            again + "--update asks for its newest version.",
        )
    if model:
        return ModelFileError(
            f"{reference.name} is damaged: {model.problem} (in {model.path}).",
            again + "repairs it.",
        )
    return ModelNotFoundError(
        f"{reference.name} is not on this machine, and llmrun is offline.", again + "brings it."
    )
