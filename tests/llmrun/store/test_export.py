"""Folders for the user: absent or complete, and taken up again where they were left."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmrun.errors import InternalError, ModelFileError, UsageError
from llmrun.store.claim import NOBODY, Claim, new_claim
from llmrun.store.disk import Disk
from llmrun.store.export import STAGING, _key, export


def _unfinished(folder: Path) -> list[Path]:
    return sorted((folder / STAGING).iterdir()) if (folder / STAGING).exists() else []


def _fill(folder: Path) -> None:
    (folder / "a").write_text("whole")


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"

    def write(folder: Path) -> None:
        assert not out.exists()
        assert folder.parent.parent == out.parent
        _fill(folder)

    assert export(out, write) == out
    assert [path.name for path in out.iterdir()] == ["a"]
    assert list(out.parent.iterdir()) == [out]
    with pytest.raises(UsageError, match="exists already"):
        export(out, write)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        _fill(folder)
        raise ModelFileError("bad", "try")

    with pytest.raises(ModelFileError):
        export(tmp_path / "out", fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, InterruptedError])
def test_what_was_interrupted_goes_on(stop: type[BaseException], tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise stop

    with pytest.raises(stop):
        export(tmp_path / "out", interrupted, "int4")
    assert len(_unfinished(tmp_path)) == 1

    def again(folder: Path) -> None:
        assert (folder / "half").read_text() == "1"
        _fill(folder)

    export(tmp_path / "out", again, "int4")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"half", "a"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_job_begins_anew_and_takes_the_old_one_away(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise KeyboardInterrupt

    for name, job in (("out", "int4"), ("other", "int4")):
        with pytest.raises(KeyboardInterrupt):
            export(tmp_path / name, interrupted, job)

    def fresh(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        _fill(folder)

    export(tmp_path / "out", fresh, "int8")
    assert len(_unfinished(tmp_path)) == 1  # that of the other name


def test_two_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    began, seen = threading.Event(), []

    def slow(folder: Path) -> None:
        began.set()
        time.sleep(0.5)
        _fill(folder)

    first = threading.Thread(target=export, args=(tmp_path / "out", slow, "job"))
    first.start()
    began.wait()
    waited: list[Claim] = []
    with pytest.raises(UsageError, match="appeared meanwhile"):
        export(tmp_path / "out", seen.append, "job", on_wait=waited.append)
    first.join()
    assert seen == []
    assert waited[0].pid == os.getpid()
    assert (tmp_path / "out" / "a").read_text() == "whole"


def test_a_folder_that_appears_meanwhile_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def overtaken(folder: Path) -> None:
        _fill(folder)
        out.mkdir()
        (out / "mine").write_text("mine")

    with pytest.raises(UsageError, match="appeared meanwhile"):
        export(out, overtaken)
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert list(tmp_path.iterdir()) == [out]


def test_another_job_that_is_at_work_keeps_its_folder(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        staging = tmp_path / STAGING
        staging.mkdir()
        path = new_claim(staging, "make", _key(tmp_path / "out", "int4"), pid=child.pid).path
        path.mkdir()
        export(tmp_path / "out", _fill, "int8")
        assert path.exists()
    finally:
        child.kill()
        child.wait()


def test_disk_errors_are_named(tmp_path: Path) -> None:
    def hook(call: str, path: Path) -> None:
        if call == "rename":
            raise OSError(28, os.strerror(28))

    with pytest.raises(InternalError, match="No space left"):
        export(tmp_path / "out", _fill, disk=Disk(hook))
    assert list(tmp_path.iterdir()) == []


def test_a_planted_link_is_not_taken_over(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "kept").write_text("theirs")
    out = tmp_path / "home" / "out"
    staging = out.parent / STAGING
    staging.mkdir(parents=True)
    planted = new_claim(staging, "make", _key(out, "int4"), pid=NOBODY).path
    planted.symlink_to(foreign)
    export(out, _fill, "int4")
    assert not out.is_symlink()
    assert [path.name for path in out.iterdir()] == ["a"]
    assert (foreign / "kept").read_text() == "theirs"
