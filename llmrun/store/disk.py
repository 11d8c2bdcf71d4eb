"""Every change the store makes to the disk: about a dozen calls, each announced to a hook.

The hook sees ``(call, path)`` before the call happens, so a test can stop the process, or raise
any OSError, at the n-th change and look at what is left. Files are created exclusively, which
never follows a link.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1024 * 1024


def _nothing(call: str, path: Path) -> None:
    """The hook of everyday use."""


class Disk:
    """The calls; ``hook(call, path)`` runs before each and may raise."""

    def __init__(self, hook: Callable[[str, Path], None] = _nothing) -> None:
        self._hook = hook

    def make_folder(self, path: Path) -> None:
        """Create one private folder; FileExistsError if the name is taken."""
        self._hook("make_folder", path)
        path.mkdir(mode=0o700)

    def make_folders(self, path: Path) -> None:
        """Create the folder and its parents where they are missing, each made durable."""
        if not path.is_dir():
            self.make_folders(path.parent)
            self._hook("make_folders", path)
            path.mkdir(mode=0o700, exist_ok=True)
            self.sync_folder(path.parent)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing; FileExistsError if the name is taken, even by a link."""
        self._hook("create", path)
        return path.open("xb")

    def reopen(self, path: Path) -> BinaryIO:
        """Open an existing regular file of ours to read and extend it; links are refused."""
        self._hook("reopen", path)
        no_follow = getattr(os, "O_NOFOLLOW", 0)
        return open(path, "r+b", opener=lambda name, flags: os.open(name, flags | no_follow))

    def write(self, file: BinaryIO, block: bytes) -> None:
        """Append a block."""
        self._hook("write", Path(file.name))
        file.write(block)

    def sync(self, file: BinaryIO) -> None:
        """Make a file's bytes durable."""
        self._hook("sync", Path(file.name))
        file.flush()
        os.fsync(file.fileno())

    def sync_file(self, path: Path) -> None:
        """Make the bytes of a file somebody else wrote durable."""
        self._hook("sync_file", path)
        with path.open("r+b") as file:
            os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable; Windows has no such call and needs none."""
        self._hook("sync_folder", path)
        if os.name != "nt":
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Move a folder to a free name; OSError if the name is taken."""
        self._hook("rename", new)
        old.rename(new)

    def replace(self, old: Path, new: Path) -> None:
        """Move a file to a name, which changes from its old to its new content in one step."""
        self._hook("replace", new)
        old.replace(new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name, or a copy where the file system knows no hard links."""
        self._hook("link", new)
        try:
            os.link(old, new, follow_symlinks=False)
        except (OSError, NotImplementedError):
            with old.open("rb") as source, new.open("xb") as copy:
                shutil.copyfileobj(source, copy, BLOCK_BYTES)
                os.fsync(copy.fileno())

    def remove_file(self, path: Path) -> None:
        """Delete a file if it is there."""
        self._hook("remove_file", path)
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Delete a folder with all in it, or a file; one that vanishes meanwhile is no error."""
        self._hook("remove_tree", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """Bytes that can still be written below ``path``."""
        return shutil.disk_usage(path).free


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_full(err: OSError) -> bool:
    """Whether the error says that no more bytes fit: a full disk or a used-up quota."""
    return err.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
