"""Writing a folder for the user, outside the store: absent or complete at any instant.

It is made in a working folder beside it, below ``.llmrun-unfinished``, which says who works on it
(see ``claim``): of a process that was killed the next run of the same command takes it over.
"""

import errno
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmrun.errors import InternalError, UsageError
from llmrun.store.claim import Claim, claims, is_dead
from llmrun.store.disk import Disk
from llmrun.store.workspace import dropped_on_error, work

STAGING = ".llmrun-unfinished"
_KIND = "make"


def refuse_existing(out: Path) -> None:
    """UsageError if there is anything under the name ``out``."""
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already.", "Give -o a new folder, or remove that one.")


def export(
    out: Path,
    write: Callable[[Path], object],
    job: str = "",
    disk: Disk | None = None,
    *,
    lock_timeout_s: float = 1800.0,
    on_wait: Callable[[Claim], None] = lambda claim: None,
) -> Path:
    """Make the new folder ``out``, filled by ``write(folder)`` beside it and renamed at the end.

    ``job``: what the result is made of and how; ``write`` gets an empty folder, or what a call for
    the same ``out`` and job left when it was killed or interrupted. What other jobs for ``out``
    left is deleted. Two processes with one job do not work at once: the second waits
    (``on_wait`` is called while it does). UsageError if ``out`` exists; InternalError if the disk
    refuses. After an error nothing of ours is left.
    """
    disk = disk or Disk()
    refuse_existing(out)
    key, staging = _key(out, job), out.parent / STAGING
    try:
        disk.make_folders(out.parent)
        with (
            _tidied(staging),
            work(
                disk,
                staging,
                _KIND,
                key,
                timeout_s=lock_timeout_s,
                is_done=out.exists,
                on_wait=on_wait,
            ) as claim,
        ):
            if claim is None:
                raise _appeared(out)
            _drop_other_jobs(disk, staging, key)
            with dropped_on_error(disk, claim.path):
                write(claim.path)
                disk.sync_folder(claim.path)
                disk.rename(claim.path, out)
            disk.sync_folder(out.parent)
    except InterruptedError:
        raise  # somebody wants to stop, the disk is well
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _appeared(out) from error
        raise InternalError(
            f"{out} cannot be written: {error.strerror or error}.",
            "Free some space or choose a folder you can write to, then run the command again.",
        ) from error
    return out


def _key(out: Path, job: str) -> str:
    """Says what is made for which name; names of the same length, so that one is told apart."""
    name, recipe = (hashlib.sha256(text.encode()).hexdigest()[:12] for text in (out.name, job))
    return f"{name}-{recipe}"


def _drop_other_jobs(disk: Disk, staging: Path, key: str) -> None:
    """Delete what dead processes left that made something else for the same name."""
    same_name = key.partition("-")[0] + "-"
    for left in claims(staging):
        if left.key.startswith(same_name) and left.key != key and is_dead(left):
            disk.remove_tree(left.path)


@contextmanager
def _tidied(staging: Path) -> Iterator[None]:
    """Remove the folder of working folders at the end, unless there are some."""
    try:
        yield
    finally:
        with suppress(OSError):
            staging.rmdir()


def _appeared(out: Path) -> UsageError:
    return UsageError(f"{out} appeared meanwhile.", "Give -o another folder.")
