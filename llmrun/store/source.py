"""What a model source is, and which there are.

A source is a module of this folder that exports ``SOURCE``. It says what it handles, what is
here already (no network), what a reference consists of at a pinned revision, and it brings those
files, verified, into a private folder. Naming and publishing are not its business.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmrun.errors import InternalError
from llmrun.store.disk import Disk
from llmrun.store.model import FileRecord, LocalModel
from llmrun.store.progress import Progress
from llmrun.store.reference import Reference
from llmrun.store.settings import FetchSettings
from llmrun.store.store import Store


@dataclass(frozen=True)
class WantedFile:
    """A file as its publisher describes it: a sha256, or a git blob id where there is none.

    ``folder``: where it lies at the publisher's, "" or with a slash at its end; here it lies in
    the model's own folder.
    """

    path: str
    size: int
    sha256: str | None = None
    blob_id: str | None = None
    folder: str = ""


@dataclass(frozen=True)
class Listing:
    """What a reference consists of at one revision.

    ``opens``: the file to open, empty for the folder. ``extra_bytes``: space needed on the way
    beyond the files themselves.
    """

    revision: str
    files: tuple[WantedFile, ...]
    opens: str
    license: str | None = None
    extra_bytes: int = 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Source(Protocol):
    """A place models come from."""

    def handles(self, reference: Reference) -> bool:
        """Whether references of this kind come from here."""

    def present(self, reference: Reference, store: Store) -> LocalModel | None:
        """The model if it is on this machine, without any network; ``problem`` may be set."""

    def resolve(self, reference: Reference, settings: FetchSettings) -> Listing:
        """Pin the revision and list its files with sizes and hashes."""

    def download(
        self,
        reference: Reference,
        listing: Listing,
        folder: Path,
        settings: FetchSettings,
        progress: Progress,
        disk: Disk,
    ) -> tuple[FileRecord, ...]:
        """Bring every file of ``listing`` into ``folder``, verified and durable.

        ``folder`` may hold parts of an earlier try; whatever is not one of the files is removed.
        """


def find_sources() -> dict[str, Source]:
    """Every source, by module name."""
    return dict(_walk())


def source_for(reference: Reference) -> Source:
    """The source that handles a reference; those behind it are not imported."""
    for _, source in _walk(first=reference.kind):
        if source.handles(reference):
            return source
    raise InternalError(f"{reference.kind} models are handled by nobody.")


def _walk(first: str = "") -> Iterator[tuple[str, Source]]:
    """Sources and their modules; the module called ``first``, if there is one, before the others:
    a source is mostly named after the kind it handles."""
    package = importlib.import_module("llmrun.store")
    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    for name in sorted(modules, key=lambda name: name != first):
        source = getattr(importlib.import_module(f"llmrun.store.{name}"), "SOURCE", None)
        if source is not None:
            yield name, source
