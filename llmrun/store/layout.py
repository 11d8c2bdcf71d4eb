"""Where things lie below the store's root, and which commit a branch meant.

    models/<model>/<revision>/      files and manifest.json: a model at one pinned revision
    models/<model>/ref-<name>.json  the commit a branch or tag meant when it was last pulled
    derived/<key>/                  files and manifest.json: e.g. a quantized copy
    staging/<claim>/                work in progress, private to one process (claim.py)

A folder below models/ or derived/ appears in one step, complete, and never changes afterwards.
"""

import json
from contextlib import suppress
from pathlib import Path

from llmrun.store import names
from llmrun.store.catalog import CatalogEntry
from llmrun.store.claim import new_claim
from llmrun.store.disk import Disk
from llmrun.store.reference import Reference

MODELS, DERIVED, STAGING = "models", "derived", "staging"
DEFAULT_BRANCH = "main"


def origin(reference: Reference) -> str:
    """Where a hub or pypi reference comes from, in words; equal origins share a folder."""
    if reference.kind == "pypi" and reference.entry:
        return f"{reference.entry.package} {reference.entry.version}"
    return f"{reference.repo}/{reference.file}" if reference.file else str(reference.repo)


def model_folder(root: Path, reference: Reference) -> Path:
    """The folder of all revisions of a model."""
    entry = reference.entry
    exact = f"pypi {entry.package} {entry.member}" if entry and reference.kind == "pypi" else ""
    return root / MODELS / names.slug(exact or f"hub {origin(reference)}")


def wheel_revision(entry: CatalogEntry) -> str:
    """The revision of a model that comes in a wheel: the package's version and the exact member."""
    return f"{entry.version}-{entry.member_sha256[:12]}"


def pinned_revision(root: Path, reference: Reference) -> str | None:
    """The revision a reference means as far as this machine knows, without network; else None."""
    entry = reference.entry
    if reference.kind == "pypi" and entry:
        return wheel_revision(entry)
    if reference.revision and names.is_commit(reference.revision):
        return reference.revision
    return _commit_in(_ref(root, reference))


def remember(disk: Disk, root: Path, reference: Reference, commit: str) -> None:
    """Record which commit a branch or tag means from now on, in one step."""
    target = _ref(root, reference)
    if reference.kind != "hub" or reference.revision == commit or _commit_in(target) == commit:
        return
    branch = reference.revision or DEFAULT_BRANCH
    disk.make_folders(root / STAGING)
    draft = new_claim(root / STAGING, "trash", "ref").path
    with disk.create(draft) as file:
        disk.write(file, json.dumps({"revision": branch, "commit": commit}).encode())
        disk.sync(file)
    disk.make_folders(target.parent)
    disk.replace(draft, target)
    disk.sync_folder(target.parent)


def forget(disk: Disk, folder: Path) -> None:
    """Drop what branches meant if it was the revision in ``folder``, which is gone."""
    for ref in folder.parent.glob("ref-*.json"):
        if _commit_in(ref) == folder.name:
            disk.remove_file(ref)


def _ref(root: Path, reference: Reference) -> Path:
    branch = reference.revision or DEFAULT_BRANCH
    return model_folder(root, reference) / f"ref-{names.slug(branch)}.json"


def _commit_in(ref: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        commit = json.loads(ref.read_bytes())["commit"]
        if isinstance(commit, str) and names.is_commit(commit):
            return commit
    return None
