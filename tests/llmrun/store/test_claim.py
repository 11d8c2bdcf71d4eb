"""Working folders: whose they are, and which are swept."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmrun.store import claim
from llmrun.store.claim import NOBODY, Claim, is_dead, is_live, new_claim, parse, sweep
from llmrun.store.disk import Disk

DAY_S = 24 * 3600


@pytest.fixture
def ended_pid() -> int:
    """The number of a process that has ended."""
    command = [sys.executable, "-c", "import os; print(os.getpid())"]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


def lay(staging: Path, kind: str, pid: int, age_s: float, machine: str | None = None) -> Path:
    """A claim folder of an owner and an age."""
    made = new_claim(staging, kind, "key", pid=pid)
    path = made.path
    if machine:
        path = staging / made.path.name.replace(f".{made.machine}.", f".{machine}.")
    path.mkdir(parents=True)
    (path / "half").write_bytes(b"x")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_name_states_its_owner(tmp_path: Path) -> None:
    made = new_claim(tmp_path, "pull", "a-key")
    assert parse(made.path) == made
    assert made.pid == os.getpid()
    assert parse(tmp_path / "something else") is None
    assert parse(tmp_path / "a.b.c.d.e.f") is None


def test_owners(tmp_path: Path, ended_pid: int) -> None:
    def owner(pid: int, age_s: float = 0.0, machine: str | None = None) -> Claim:
        found = parse(lay(tmp_path, "make", pid, age_s, machine))
        assert found
        return found

    assert is_live(owner(os.getppid(), age_s=DAY_S))
    assert is_dead(owner(ended_pid))
    assert not is_live(owner(ended_pid))
    assert is_dead(owner(NOBODY))
    elsewhere = owner(ended_pid, machine="0badcafe")
    assert not is_dead(elsewhere)
    assert is_live(elsewhere)
    silent = owner(ended_pid, age_s=61, machine="0badcafe")
    assert not is_dead(silent)
    assert not is_live(silent)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="zombies are told by /proc")
def test_a_zombie_is_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        made = new_claim(tmp_path, "pull", "key", pid=child.pid)
        deadline = time.monotonic() + 10
        while not is_dead(made) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert is_dead(made)
    finally:
        child.wait()


def test_r069_sweep_spares_what_is_live_young_or_can_be_continued(
    tmp_path: Path, ended_pid: int
) -> None:
    staging = tmp_path / "staging"
    kept = [
        lay(staging, "make", os.getppid(), age_s=8 * DAY_S),
        lay(staging, "pull", ended_pid, age_s=6 * DAY_S),
        lay(staging, "pull", NOBODY, age_s=6 * DAY_S),
        lay(staging, "make", ended_pid, age_s=6 * DAY_S),
        lay(staging, "make", NOBODY, age_s=6 * DAY_S),
        lay(staging, "make", ended_pid, age_s=6 * DAY_S, machine="0badcafe"),
        lay(staging, "pull", ended_pid, age_s=6 * DAY_S, machine="0badcafe"),
    ]
    gone = [
        lay(staging, "make", ended_pid, age_s=8 * DAY_S),
        lay(staging, "trash", ended_pid, age_s=0),
        lay(staging, "pull", ended_pid, age_s=8 * DAY_S),
        lay(staging, "make", ended_pid, age_s=8 * DAY_S, machine="0badcafe"),
        lay(staging, "pull", ended_pid, age_s=8 * DAY_S, machine="0badcafe"),
    ]
    (staging / "odd").mkdir()
    (staging / "old odd").mkdir()
    os.utime(staging / "old odd", (0, 0))
    sweep(Disk(), staging)
    assert sorted(staging.iterdir()) == sorted([*kept, staging / "odd"])
    assert not [path for path in gone if path.exists()]


def test_sweep_of_nothing(tmp_path: Path) -> None:
    sweep(Disk(), tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_heartbeat_touches_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "BEAT_S", 0.01)
    os.utime(tmp_path, (0, 0))
    with claim.heartbeat(tmp_path):
        deadline = time.monotonic() + 5
        while tmp_path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert tmp_path.stat().st_mtime > 0
