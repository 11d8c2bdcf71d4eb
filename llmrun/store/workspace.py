"""Build something in private, then give it its name in one step.

``work`` yields a claim for a key, waiting while a live process builds the same thing; ``publish``
moves the finished folder to its final name. At every instant that name is absent, old or new,
for any number of processes: the rename decides, and the loser uses the winner's folder.
"""

import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrun.errors import DownloadError
from llmrun.store import manifest as manifests
from llmrun.store.claim import (
    NOBODY,
    RESUMABLE,
    Claim,
    claims,
    heartbeat,
    is_dead,
    is_live,
    new_claim,
    sweep,
)
from llmrun.store.disk import Disk
from llmrun.store.manifest import Manifest

POLL_S = 0.2
ATTEMPTS = 8


@contextmanager
def work(
    disk: Disk,
    staging: Path,
    kind: str,
    key: str,
    *,
    timeout_s: float,
    is_done: Callable[[], bool],
    on_wait: Callable[[Claim], None],
) -> Iterator[Claim | None]:
    """Yield a claim to build ``key`` in, or None once ``is_done``, be it somebody else's doing.

    Waits at most ``timeout_s`` for a live owner (DownloadError names it); ``on_wait`` is called
    at every look. A folder of a resumable kind that was not published when the block ends, and that
    holds anything, is left without an owner for the next try to continue; any other is deleted.
    """
    disk.make_folders(staging)
    sweep(disk, staging)
    claim = _acquire(disk, staging, kind, key, timeout_s, is_done, on_wait)
    if claim is None:
        yield None
        return
    try:
        with heartbeat(claim.path):
            yield claim
    finally:
        _release(disk, staging, claim)
    for left in claims(staging):
        if left.key == key and left.kind == kind and is_dead(left):
            disk.remove_tree(left.path)


@contextmanager
def dropped_on_error(disk: Disk, folder: Path) -> Iterator[None]:
    """Delete a working folder if the block fails: it would fail again. Who interrupts it goes on
    later."""
    try:
        yield
    except InterruptedError:
        raise
    except Exception:
        disk.remove_tree(folder)
        raise


def _acquire(
    disk: Disk,
    staging: Path,
    kind: str,
    key: str,
    timeout_s: float,
    is_done: Callable[[], bool],
    on_wait: Callable[[Claim], None],
) -> Claim | None:
    deadline = time.monotonic() + timeout_s
    while not is_done():
        rivals = _rivals(staging, kind, key)
        if not rivals:
            claim = _begin(disk, staging, kind, key)
            if not _rivals(staging, kind, key, claim):
                return claim
            # Two began at the same moment. Only who sees nobody after its folder exists goes on,
            # so of two at least one steps back; chance decides who is first next time.
            _release(disk, staging, claim)
            time.sleep(random.uniform(0, POLL_S))
            continue
        if time.monotonic() >= deadline:
            raise DownloadError(
                f"Waited {timeout_s:.0f} s for {rivals[0].owner}, which is working on the same "
                f"model in {staging}.",
                "Let it finish or stop it, then run the command again.",
            )
        on_wait(rivals[0])
        time.sleep(POLL_S)
    return None


def _rivals(staging: Path, kind: str, key: str, own: Claim | None = None) -> list[Claim]:
    return [
        claim
        for claim in claims(staging)
        if claim.kind == kind
        and claim.key == key
        and not (own and claim.path == own.path)
        and is_live(claim)
    ]


def _begin(disk: Disk, staging: Path, kind: str, key: str) -> Claim:
    """A claim of our own: a dead process's folder under our name, or a new one."""
    claim = new_claim(staging, kind, key)
    for left in claims(staging):
        same = left.kind == kind and left.key == key
        if kind in RESUMABLE and same and is_dead(left) and _is_ours(left.path):
            try:
                disk.rename(left.path, claim.path)
            except FileNotFoundError:  # another process was faster
                continue
            return claim
    disk.make_folder(claim.path)
    return claim


def _is_ours(path: Path) -> bool:
    """Whether a folder is one, and this user's: others may write beside it, too."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    owned = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISDIR(status.st_mode) and owned


def _release(disk: Disk, staging: Path, claim: Claim) -> None:
    """End a claim whose folder was not published: leave what can be continued, drop the rest."""
    if not claim.path.exists():
        return
    if claim.kind in RESUMABLE and any(claim.path.iterdir()):
        disk.rename(claim.path, new_claim(staging, claim.kind, claim.key, pid=NOBODY).path)
    else:
        disk.remove_tree(claim.path)


def publish(disk: Disk, staging: Path, folder: Path, target: Path, manifest: Manifest) -> None:
    """Give a finished folder, whose files are durable, its final name; its manifest comes last.

    If ``target`` is whole by then, it stays and ``folder`` is dropped. A damaged one steps aside.
    """
    manifests.write(disk, folder, manifest)
    disk.sync_folder(folder)
    disk.make_folders(target.parent)
    for _ in range(ATTEMPTS):
        try:
            disk.rename(folder, target)
        except OSError:
            if not target.exists():
                raise
            if manifests.is_complete(target):
                disk.remove_tree(folder)
                return
            discard(disk, staging, target)
            continue
        disk.sync_folder(target.parent)
        return
    raise DownloadError(
        f"{target} is being replaced by other processes again and again.",
        "Run one command at a time.",
    )


def discard(disk: Disk, staging: Path, target: Path) -> None:
    """Take a published folder out of sight in one step, then delete it."""
    disk.make_folders(staging)
    trash = new_claim(staging, "trash", "x").path
    try:
        disk.rename(target, trash)
    except FileNotFoundError:  # another process did it
        return
    disk.sync_folder(target.parent)
    disk.remove_tree(trash)
