"""Writing a folder for the user, outside the store: absent or complete at any instant."""

import errno
import secrets
from collections.abc import Callable
from pathlib import Path

from llmrun.errors import InternalError, UsageError
from llmrun.store.disk import Disk


def refuse_existing(out: Path) -> None:
    """UsageError if there is anything under the name ``out``."""
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already.", "Give -o a new folder, or remove that one.")


def export(out: Path, write: Callable[[Path], None], disk: Disk | None = None) -> Path:
    """Make the new folder ``out``, filled by ``write(folder)`` beside it and renamed at the end.

    UsageError if ``out`` exists; InternalError if the disk refuses. After an error nothing of
    ours is left.
    """
    disk = disk or Disk()
    refuse_existing(out)
    private = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        disk.make_folders(out.parent)
        disk.make_folder(private)
        try:
            write(private)
            disk.sync_folder(private)
            disk.rename(private, out)
            disk.sync_folder(out.parent)
        finally:
            if private.exists():
                disk.remove_tree(private)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UsageError(f"{out} appeared meanwhile.", "Give -o another folder.") from error
        raise InternalError(
            f"{out} cannot be written: {error.strerror or error}.",
            "Free some space or choose a folder you can write to, then run the command again.",
        ) from error
    return out
