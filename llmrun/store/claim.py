"""Private working folders, and who owns them.

A claim is a folder ``<kind>.<key>.<machine>.<pid>.<start>.<token>`` below ``staging/``: its name
says which process on which machine builds what, so one ``mkdir`` makes folder and owner at once
and a killed owner leaves nothing that anybody must delete by hand. No file lock is used: on some
shared file systems ``flock`` succeeds for everyone. Nothing that is published depends on claims;
they only keep two processes from doing the same work, and let a dead one's work be continued.

An owner on this machine is dead when its process is gone. Of any other owner only the heartbeat
(the folder's modification time) is known: silent for 60 s, it is no longer waited for, but its
folder is left alone until it is a day old, because it may still be writing.
"""

import hashlib
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmrun.store.disk import Disk

NOBODY = 0  # the owner of a folder that was left on purpose
BEAT_S = 5.0
SILENT_S = 60.0
YOUNG_S = 24 * 3600.0
RESUMABLE_S = 7 * 24 * 3600.0

RESUMABLE = ("pull", "make")
"""Kinds of work that another process can go on with where a dead one stopped."""


@dataclass(frozen=True)
class Claim:
    """A working folder and the owner its name states."""

    path: Path
    kind: str
    key: str
    machine: str
    pid: int
    started: str
    token: str

    @property
    def owner(self) -> str:
        """The owner in words."""
        here = "" if self.machine == machine_id() else " on another machine"
        return f"process {self.pid}{here}"


def machine_id() -> str:
    """What tells this machine, boot and process namespace from others: pids compare within it."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii"))
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def new_claim(staging: Path, kind: str, key: str, pid: int | None = None) -> Claim:
    """A claim of this process (or ``pid``); its folder is not made yet. Later tokens are higher."""
    pid = os.getpid() if pid is None else pid
    token = f"{time.time_ns():020d}{secrets.token_hex(4)}"
    started = _process(pid)[1]
    machine = machine_id()
    path = staging / f"{kind}.{key}.{machine}.{pid}.{started}.{token}"
    return Claim(path, kind, key, machine, pid, started, token)


def parse(path: Path) -> Claim | None:
    """The claim a folder name states; None if it is no such name."""
    parts = path.name.split(".")
    if len(parts) != 6 or not parts[3].isdecimal():
        return None
    kind, key, machine, pid, started, token = parts
    return Claim(path, kind, key, machine, int(pid), started, token)


def claims(staging: Path) -> list[Claim]:
    """All claims below ``staging``, oldest first."""
    try:
        found = [claim for path in staging.iterdir() if (claim := parse(path))]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda claim: claim.token)


def is_dead(claim: Claim) -> bool:
    """Whether the owner is known to be gone: it left the folder, or ran here and runs no more."""
    if claim.pid == NOBODY:
        return True
    # Windows ends a process that is sent signal 0; there only the heartbeat counts.
    if claim.machine != machine_id() or os.name == "nt":
        return False
    try:
        os.kill(claim.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's process, so it runs
        pass
    state, started = _process(claim.pid)
    return state in ("Z", "X") or started != claim.started


def is_live(claim: Claim) -> bool:
    """Whether the owner is worth waiting for."""
    if claim.machine == machine_id() and claim.pid == os.getpid():
        # Another thread of ours, or a folder that we failed to give up: then it beats no more.
        return age_s(claim.path) < 3 * BEAT_S
    if claim.pid == NOBODY or (claim.machine == machine_id() and os.name != "nt"):
        return not is_dead(claim)
    return age_s(claim.path) < SILENT_S


def age_s(path: Path) -> float:
    """Seconds since the folder's last sign of life; 0 if it is gone."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


@contextmanager
def heartbeat(path: Path) -> Iterator[None]:
    """Show a sign of life on ``path`` every few seconds while the block runs."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="llmrun-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def sweep(disk: Disk, staging: Path) -> None:
    """Delete what dead owners left and nobody can continue; young and live folders stay.

    A dead download or conversion is kept a week, because the next one of that key continues it.
    """
    for claim in claims(staging):
        if is_dead(claim) and (claim.kind not in RESUMABLE or age_s(claim.path) > RESUMABLE_S):
            disk.remove_tree(claim.path)
    with suppress(FileNotFoundError):
        for path in list(staging.iterdir()):
            found = parse(path)
            limit_s = RESUMABLE_S if found and found.kind in RESUMABLE else YOUNG_S
            if age_s(path) > limit_s and not (found and is_live(found)):
                disk.remove_tree(path)


def _process(pid: int) -> tuple[str, str]:
    """State letter and start time of a process where the OS tells (Linux), else ("", "0").

    The start time makes a reused process number a different process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return "", "0"
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
