"""Files as memory: opened once, checked to be regular, mapped copy-on-write.

The views are writable (a backend may wrap them without a copy) and writing never reaches the
file. Links are refused, except the one layout the hub's cache uses: a snapshot entry that points
into the ``blobs`` folder of the same repository. Devices, pipes and folders are refused.
"""

import errno
import mmap
import os
import stat
import weakref
from pathlib import Path

from llmrun.errors import ModelFileError, ModelNotFoundError
from llmrun.formats.damage import damaged


def map_file(path: Path) -> memoryview:
    """Return the bytes of a regular file as a flat, writable, private view.

    Raises ModelNotFoundError if it does not exist, ModelFileError if it is a link or no regular
    file, or cannot be read.
    """
    target = _target(path)
    # Without O_NONBLOCK, opening a pipe would wait for a writer for ever.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(target, flags | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path} does not exist.", "Check the path.") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link(path) from error
        raise ModelFileError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise damaged(path, "not a regular file", "Give a file or a model's folder.")
        if status.st_size == 0:
            return memoryview(bytearray())
        return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be mapped: {error.strerror}.") from error
    finally:
        os.close(descriptor)


def passing(view: memoryview, start: int, end: int) -> memoryview:
    """Return a part of a file that ``map_file`` mapped, for somebody who reads it once.

    When nobody holds it any more, its pages no longer count as this process' memory; they stay in
    the system's cache, and reading it again is as right as before.
    """
    part = view[start:end]
    mapped = view.obj
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and length > 0:
        finalizer = weakref.finalize(part, mapped.madvise, mmap.MADV_DONTNEED, first, length)
        finalizer.atexit = False
    return part


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a small file; ModelFileError if it has more than ``most`` bytes."""
    view = map_file(path)
    if view.nbytes > most:
        raise damaged(path, f"{view.nbytes:,} bytes, more than the {most:,} allowed")
    return bytes(view)


def _target(path: Path) -> Path:
    if not path.is_symlink():
        return path
    folder = path.parent
    target = path.resolve()
    blobs = (folder.parent.parent / "blobs").resolve()
    if folder.parent.name == "snapshots" and target.parent == blobs:
        return target
    raise _link(path)


def _link(path: Path) -> ModelFileError:
    return damaged(path, "a symbolic link, which is not followed", "Give the file it points to.")
