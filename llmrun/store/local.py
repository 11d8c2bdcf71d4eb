"""Models the user already has: a folder or a ``.gguf`` file, used in place and never copied."""

from pathlib import Path

from llmrun.errors import ModelFileError, ModelNotFoundError, UsageError
from llmrun.store import names
from llmrun.store.disk import Disk
from llmrun.store.model import FileRecord, LocalModel
from llmrun.store.progress import Progress
from llmrun.store.reference import PICKLES, Reference
from llmrun.store.settings import FetchSettings
from llmrun.store.source import Listing
from llmrun.store.store import Store


class LocalSource:
    """Folders and files outside the store."""

    def handles(self, reference: Reference) -> bool:
        """Folders and .gguf files."""
        return reference.kind in ("folder", "gguf")

    def present(self, reference: Reference, store: Store) -> LocalModel | None:
        """The model in place; None if it is gone. ModelFileError for a folder of pickles only."""
        path = reference.path
        if path is None or not path.exists():
            return None
        if path.is_symlink():
            path = path.resolve()  # the user named it; links inside a model are another matter
        if path.is_file():
            found = [path.with_name(name) for name in names.parts_of(path.name)]
            found = [part for part in found if part.is_file()]  # formats says what is missing
        else:
            found = sorted(p for p in path.iterdir() if p.is_file())
        kinds = {p.suffix for p in found}
        if path.is_dir() and not kinds & {".safetensors", ".gguf"}:
            raise _no_weights(path, sorted(kinds & set(PICKLES)))
        files = tuple(FileRecord(p.name, p.stat().st_size, None) for p in found)
        return LocalModel(
            name=reference.name,
            source=reference.kind,
            origin=str(path),
            revision=None,
            path=path,
            files=files,
            bytes=sum(record.size for record in files),
        )

    def resolve(self, reference: Reference, settings: FetchSettings) -> Listing:
        """Nothing to list: what is there is used in place, what is not cannot be fetched."""
        if reference.path is not None and reference.path.exists():
            raise UsageError(
                f"{reference.path} is used in place: there is nothing to update it from.",
                "Leave out --update.",
            )
        raise ModelNotFoundError(
            f"{reference.path} does not exist any more.", "Check the path and type it again."
        )

    def download(
        self,
        reference: Reference,
        listing: Listing,
        folder: Path,
        settings: FetchSettings,
        progress: Progress,
        disk: Disk,
    ) -> tuple[FileRecord, ...]:
        """Never needed, since ``resolve`` lists nothing."""
        raise ModelNotFoundError(f"{reference.path} cannot be downloaded.")


def _no_weights(path: Path, pickles: list[str]) -> ModelFileError:
    if pickles:
        return ModelFileError(
            f"{path} holds its weights as pickles only ({', '.join(pickles)}), which can run code "
            "when they are opened; llmrun never reads one.",
            "Use a version of the model in safetensors or GGUF.",
        )
    return ModelFileError(
        f"{path} holds no .safetensors or .gguf file.", "Name the folder that has the weights."
    )


SOURCE = LocalSource()
