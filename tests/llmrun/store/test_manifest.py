"""manifest.json: every damage makes its folder count as absent."""

import dataclasses
import json
from pathlib import Path

import pytest

from llmrun.errors import ModelFileError
from llmrun.store import manifest as manifests
from llmrun.store.disk import Disk
from llmrun.store.manifest import Manifest, UnreadableManifestError
from llmrun.store.model import FileRecord

GOOD = Manifest(
    kind="model",
    source="hub",
    origin="org/tiny",
    revision="a" * 40,
    opens="",
    files=(FileRecord("config.json", 2, "0" * 64), FileRecord("sub/x", 1, "1" * 64)),
    alias="tiny",
    license="MIT",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole published folder."""
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_bytes(b"x")
    manifests.write(Disk(), tmp_path, GOOD)
    return tmp_path


def test_written_and_read(folder: Path) -> None:
    assert manifests.read(folder) == GOOD
    assert manifests.is_complete(folder)
    assert GOOD.size == 3


@pytest.mark.slow
def test_cut_at_every_byte_never_counts_as_complete(folder: Path) -> None:
    text = (folder / "manifest.json").read_bytes()
    for n in range(len(text)):
        (folder / "manifest.json").write_bytes(text[:n])
        assert not manifests.is_complete(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"path": "../x", "size": 1, "sha256": "0" * 64}]},
        {"files": [{"path": "/etc/passwd", "size": 1, "sha256": "0" * 64}]},
        {"files": [{"path": "x", "size": "1", "sha256": "0" * 64}]},
        {"files": [{"path": "x", "size": 1, "sha256": None}]},
        {"files": [{"path": "x", "size": 1, "sha256": "0" * 63}]},
        {"files": [{"path": "x"}]},
        {"files": [3]},
        {"files": None},
        {"opens": "absent"},
        {"origin": 3},
        {"surprise": "x"},
        {"alias": 3},
        {"format": "one"},
    ],
)
def test_bad_content_is_damage(change: dict[str, object], folder: Path) -> None:
    document = json.loads((folder / "manifest.json").read_text("utf-8"))
    (folder / "manifest.json").write_text(json.dumps({**document, **change}), "utf-8")
    with pytest.raises(UnreadableManifestError):
        manifests.read(folder)
    assert not manifests.is_complete(folder)


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "[" * 100_000, '{"format": 1}', "\ud800"])
def test_no_json_object_is_damage(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text, "utf-8", "surrogatepass")
    assert not manifests.is_complete(folder)


def test_p10_a_newer_format_is_refused_by_name(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 2}', "utf-8")
    with pytest.raises(ModelFileError, match="format 2"):
        manifests.read(folder)


def test_sizes_and_links_are_looked_at(folder: Path, tmp_path: Path) -> None:
    assert manifests.damage(folder, GOOD) is None
    (folder / "sub" / "x").write_bytes(b"xy")
    assert manifests.damage(folder, GOOD) == "sub/x has 2 bytes instead of 1"
    (folder / "sub" / "x").unlink()
    assert manifests.damage(folder, GOOD) == "sub/x is missing"
    (folder / "sub" / "x").symlink_to(folder / "config.json")
    linked = dataclasses.replace(GOOD, files=(FileRecord("sub/x", 2, "1" * 64),))
    assert manifests.damage(folder, linked) == "sub/x is missing"
