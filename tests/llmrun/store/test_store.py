"""Derived artefacts, listing and removal: old or new, and nothing to clean up."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmrun.errors import (
    DownloadError,
    InternalError,
    ModelFileError,
    ModelNotFoundError,
    UsageError,
)
from llmrun.store import claim, layout
from llmrun.store.claim import new_claim
from llmrun.store.derived import Key, key_for
from llmrun.store.disk import Disk
from llmrun.store.fetch import FetchSettings, fetch
from llmrun.store.manifest import Manifest
from llmrun.store.model import FileRecord, LocalModel
from llmrun.store.progress import SilentProgress
from llmrun.store.reference import Reference
from llmrun.store.store import Store

KEY = Key(model="org/tiny", parent="0" * 64, recipe="int8")
ReadManifest = Callable[[Path], Mapping[str, Any]]


def writer(content: bytes = b"codes", calls: list[Path] | None = None) -> Callable[[Path], None]:
    """A function that writes a two-file artefact and notes that it was called."""

    def write(folder: Path) -> None:
        if calls is not None:
            calls.append(folder)
        (folder / "sub").mkdir()
        (folder / "model.safetensors").write_bytes(content)
        (folder / "sub" / "scales").write_bytes(b"1")

    return write


@pytest.fixture
def pulled(
    store: Store, settings: FetchSettings, tiny_repo: str, reference: Callable[..., Reference]
) -> LocalModel:
    """org/tiny in the store."""
    return fetch(reference("org/tiny"), store, settings, SilentProgress())


def test_ensure_builds_once(store: Store, read_manifest: ReadManifest) -> None:
    calls: list[Path] = []
    path = store.ensure(KEY, writer(calls=calls))
    assert store.ensure(KEY, writer(calls=calls)) == path
    assert len(calls) == 1
    assert calls[0] != path
    manifest = read_manifest(path)
    assert manifest["recipe"] == "int8"
    assert manifest["format"] == 1
    assert [row["path"] for row in manifest["files"]] == ["model.safetensors", "sub/scales"]
    assert [made.recipe for made in store.derived()] == ["int8"]
    assert list(store.staging.iterdir()) == []


def test_other_recipes_and_parents_are_other_artefacts(store: Store) -> None:
    keys = [KEY, Key("org/tiny", "0" * 64, "int4"), Key("org/tiny", "1" * 64, "int8")]
    assert len({store.ensure(key, writer()) for key in keys}) == 3


def damage_shorter(path: Path) -> None:
    """Cut one byte."""
    (path / "model.safetensors").write_bytes(b"code")


def damage_missing(path: Path) -> None:
    """Delete a file."""
    (path / "sub" / "scales").unlink()


def damage_manifest(path: Path) -> None:
    """Cut the manifest."""
    text = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(text[: len(text) // 2])


def damage_no_manifest(path: Path) -> None:
    """Delete the manifest."""
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    "damage", [damage_shorter, damage_missing, damage_manifest, damage_no_manifest]
)
def test_r076_damaged_artefacts_are_rebuilt(
    damage: Callable[[Path], None], store: Store, read_manifest: ReadManifest
) -> None:
    path = store.ensure(KEY, writer())
    damage(path)
    assert store.derived()[0].problem
    assert store.ensure(KEY, writer()) == path
    assert (path / "model.safetensors").read_bytes() == b"codes"
    assert store.derived()[0].problem is None
    assert list(store.staging.iterdir()) == []


def test_a_failing_writer_leaves_nothing(store: Store) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise ModelFileError("the source is damaged")

    with pytest.raises(ModelFileError):
        store.ensure(KEY, fail)
    assert store.derived() == []
    assert list(store.staging.iterdir()) == []


def test_a_writer_that_writes_nothing_or_links_is_our_fault(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InternalError):
        store.ensure(KEY, lambda folder: None)
    with pytest.raises(InternalError, match="link"):
        store.ensure(KEY, lambda folder: (folder / "x").symlink_to(tmp_path))


def test_a_disk_error_while_building_is_named_and_leaves_nothing(store: Store) -> None:
    def full(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(InternalError, match="No space left"):
        store.ensure(KEY, full)
    assert list(store.staging.iterdir()) == []
    assert store.ensure(KEY, writer()).is_dir()


def test_threads_that_want_the_same_build_it_once(store: Store) -> None:
    calls: list[Path] = []

    def slow(folder: Path) -> None:
        time.sleep(0.3)
        writer(calls=calls)(folder)

    paths: list[Path] = []
    workers = [
        threading.Thread(target=lambda: paths.append(store.ensure(KEY, slow))) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(paths)) == 1
    assert len(paths) == 4
    assert len(calls) == 1


def test_the_loser_of_a_race_uses_the_winners_artefact(store: Store, tmp_path: Path) -> None:
    def overtaken(folder: Path) -> None:
        writer(b"second")(folder)
        other = Store(store.root)
        hidden = store.root / "hidden"
        (store.root / "staging").rename(hidden)
        (store.root / "staging").mkdir()
        other.ensure(KEY, writer(b"first"))
        (store.root / "staging").rmdir()
        hidden.rename(store.root / "staging")

    path = store.ensure(KEY, overtaken)
    assert (path / "model.safetensors").read_bytes() == b"first"
    assert list(store.staging.iterdir()) == []


def test_a_live_owner_is_waited_for_then_named(store: Store) -> None:
    seen = []
    store.staging.mkdir(parents=True)
    new_claim(store.staging, "make", KEY.folder).path.mkdir()
    with pytest.raises(DownloadError, match=f"process {os.getpid()}"):
        store.ensure(KEY, writer(), lock_timeout_s=0.3, on_wait=seen.append)
    assert seen


def test_p10_a_newer_format_is_refused_by_name(
    store: Store,
    pulled: LocalModel,
    reference: Callable[..., Reference],
    read_manifest: ReadManifest,
) -> None:
    newer = {**read_manifest(pulled.path), "format": 2, "unknown": []}
    (pulled.path / "manifest.json").write_text(json.dumps(newer), "utf-8")
    with pytest.raises(ModelFileError, match="newer llmrun"):
        store.find(reference("org/tiny"))
    assert "newer llmrun" in str(store.models()[0].problem)
    assert store.remove(store.models()[0].name)
    assert store.models() == []


def test_models_lists_what_was_pulled(store: Store, pulled: LocalModel, tiny_repo: str) -> None:
    assert Store(store.root).models() == [pulled]
    assert (pulled.name, pulled.source, pulled.revision) == ("org/tiny", "hub", tiny_repo)


@pytest.mark.parametrize("how", ["name", "revision", "reference"])
def test_remove_says_what_went(
    how: str, store: Store, pulled: LocalModel, reference: Callable[..., Reference], tiny_repo: str
) -> None:
    store.ensure(key_for(pulled, "int8"), writer())
    store.ensure(Key("org/other", "1" * 64, "int8"), writer())
    names = {"name": "org/tiny", "revision": f"org/tiny@{tiny_repo[:8]}"}
    removed = store.remove(names.get(how) or reference("org/tiny"))
    assert [item.name for item in removed] == ["org/tiny", "org/tiny int8"]
    assert removed[0].bytes > pulled.bytes
    assert not pulled.path.exists()
    assert store.models() == []
    assert [made.model for made in store.derived()] == ["org/other"]
    assert store.find(reference("org/tiny")) is None
    assert list(store.staging.iterdir()) == []


@pytest.fixture
def several(store: Store) -> list[str]:
    """Revisions of org/many; the branch ``main`` means the first, two share ten digits."""
    revisions = ["a" * 10 + "0" * 30, "a" * 10 + "1" * 30, "b" * 40]
    home = layout.model_folder(store.root, Reference("org/many", "hub", repo="org/many"))
    home.mkdir(parents=True)
    for revision in revisions:
        made = store.staging / revision
        made.mkdir(parents=True)
        (made / "model.safetensors").write_bytes(revision.encode())
        files = (FileRecord("model.safetensors", 40, "cd" * 32),)
        store.publish(
            made, home / revision, Manifest("model", "hub", "org/many", revision, "", files)
        )
    for branch in (None, "a-branch"):
        known = Reference("org/many", "hub", repo="org/many", revision=branch)
        layout.remember(store.disk, store.root, known, revisions[0 if branch is None else 2])
    return revisions


@pytest.mark.parametrize(
    ("typed", "gone"),
    [
        ("main", [0]),
        ("a-branch", [2]),
        ("b" * 40, [2]),
        ("b" * 7, [2]),
        ("a" * 10 + "1", [1]),
    ],
)
def test_remove_takes_one_revision(
    typed: str, gone: list[int], store: Store, several: list[str]
) -> None:
    removed = store.remove(f"org/many@{typed}")
    assert [item.path.name for item in removed] == [several[i] for i in gone]
    left = {model.revision for model in store.models()}
    assert left == set(several) - {several[i] for i in gone}


@pytest.mark.parametrize("typed", ["", "a", "b" * 6, "other-branch", "B" * 7, "c" * 7])
def test_remove_guesses_no_revision(typed: str, store: Store, several: list[str]) -> None:
    with pytest.raises(ModelNotFoundError):
        store.remove(f"org/many@{typed}")
    assert len(store.models()) == 3


def test_remove_refuses_digits_that_fit_several(store: Store, several: list[str]) -> None:
    with pytest.raises(UsageError, match="aaaaaaaaaa00, aaaaaaaaaa11"):
        store.remove("org/many@" + "a" * 10)
    assert len(store.models()) == 3


@pytest.mark.parametrize("name", ["org/tin", "tiny", "../models", "", "*"])
def test_remove_of_what_is_not_there(name: str, store: Store, pulled: LocalModel) -> None:
    with pytest.raises(ModelNotFoundError):
        store.remove(name)
    assert store.models() == [pulled]


def test_r068_a_damaged_model_can_be_listed_and_removed(
    store: Store, pulled: LocalModel, reference: Callable[..., Reference]
) -> None:
    (pulled.path / "manifest.json").write_bytes(b"{")
    listed = store.models()[0]
    assert "damaged" in str(listed.problem)
    assert store.find(reference("org/tiny")) is None
    assert store.remove(reference("org/tiny"))
    assert store.models() == []


BUILDER = """
import os, signal, sys
from pathlib import Path
from llmrun.store.derived import Key
from llmrun.store.disk import Disk
from llmrun.store.store import Store

root = Path(sys.argv[1])
KEY = Key(model="org/tiny", parent="0" * 64, recipe="int8")

def write(folder):
    (folder / "a").write_bytes(b"1" * 1000)
    (folder / "b").write_bytes(b"2" * 1000)

def build(folder, kill_at):
    calls = 0
    def hook(call, path):
        nonlocal calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return Store(folder, Disk(hook)).ensure(KEY, write)

def forked(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as err:
            print(repr(err))
            os._exit(1)
    return os.waitpid(pid, 0)[1]

for old in (False, True):
    for kill_at in range(1, 200):
        folder = root / f"{old}-{kill_at}"
        if old:  # a damaged artefact is in the way
            target = build(folder, 0)
            (target / "a").write_bytes(b"short")
        status = forked(lambda: build(folder, kill_at))
        for made in Store(folder).derived():
            assert made.problem is None or old, made
        assert forked(lambda: build(folder, 0)) == 0
        made = Store(folder).derived()
        assert len(made) == 1 and made[0].problem is None, (kill_at, made)
        assert not list((folder / "staging").iterdir()), kill_at
        if status == 0:
            break
    print(kill_at)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_p1_p3_killed_at_every_step_the_next_run_just_works(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILDER, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [int(line) for line in done.stdout.split()]
    assert len(steps) == 2
    assert min(steps) > 8


@pytest.mark.parametrize("number", [28, 5, 30, 24])
def test_io_errors_at_every_step_are_named_and_leave_the_old_state(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "BEAT_S", 0.02)
    for fail_at in range(1, 100):
        calls = 0

        def hook(call: str, path: Path, fail_at: int = fail_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(number, os.strerror(number))

        root = tmp_path / str(fail_at)
        failed = False
        try:
            Store(root, Disk(hook)).ensure(KEY, writer())
        except InternalError:
            failed = True
        assert all(made.problem is None for made in Store(root).derived())
        assert Store(root).ensure(KEY, writer()).is_dir()
        if not failed and calls < fail_at:
            return
    pytest.fail("never got through")
