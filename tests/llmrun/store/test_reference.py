"""What typed names mean."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.errors import ModelFileError, ModelNotFoundError, UsageError
from llmrun.store.reference import Reference

Resolve = Callable[..., Reference]


def test_kinds(reference: Resolve, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert reference("tiny").kind == "hub"
    assert reference("tiny").revision == "a" * 40
    assert reference("tiny-wheel").kind == "pypi"
    assert reference("org/name").revision is None
    assert reference("org/name@v1").revision == "v1"
    assert reference("org/name@refs/pr/1").revision == "refs/pr/1"
    assert reference("org/name", "b" * 40).revision == "b" * 40
    assert reference("org/name/q.gguf@v1").file == "q.gguf"
    assert reference("org/name/Q8_0/q-00002-of-00002.gguf").file == "Q8_0/q-00001-of-00002.gguf"
    assert reference(str(tmp_path)).kind == "folder"
    assert reference(str(tmp_path / "x.gguf")).path == tmp_path / "x.gguf"


def test_pins_hold_for_the_pinned_revision_only(reference: Resolve) -> None:
    assert reference("tiny").pinned is not None
    assert reference("tiny", "main").pinned is None
    assert reference("tiny", "main").entry is not None


def test_a_folder_wins_over_a_hub_id_and_an_alias_over_a_folder(
    reference: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert reference("org/name").path == tmp_path / "org" / "name"
    assert reference("tiny").kind == "hub"
    assert reference("./tiny").kind == "folder"


def test_unknown_names_suggest_near_aliases(reference: Resolve) -> None:
    with pytest.raises(ModelNotFoundError, match=r"Did you mean tiny.*llmrun list --catalog"):
        reference("tinny")
    with pytest.raises(ModelNotFoundError):
        reference("./missing/folder")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../org/name",
        "org/..",
        "org/../x",
        "org//name",
        "/org/name",
        "org\\name",
        "C:\\x\\y",
        "org/name/extra",
        "a/b/c/../d.gguf",
        "a/b/c//d.gguf",
        "a/b/c/.d.gguf",
        "a/b/con/d.gguf",
        "a/b/c.../d.gguf",
        "a/b/1/2/3/4/5/d.gguf",
        "con/model",
        "org/nul",
        "org/na me",
        "org/name\x1b[2J",
        "\0",
        "org/name\n",
        "org/" + "x" * 97,
        "x" * 5000,
        "\u202eorg/name",
        "org/name/../q.gguf",
    ],
)
def test_sec09_hostile_names(name: str, reference: Resolve) -> None:
    if name == "..":
        assert reference(name).kind == "folder"
        return
    with pytest.raises(ModelNotFoundError) as caught:
        reference(name)
    assert str(caught.value).isprintable() or "\n" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert "\u202e" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("revision", ["", "../x", "a b", "-x", "x\n", "a/../b"])
def test_bad_revisions(revision: str, reference: Resolve) -> None:
    with pytest.raises(UsageError):
        reference("org/name", revision)
    with pytest.raises(UsageError):
        reference(f"org/name@{revision}")


def test_revisions_that_cannot_be(reference: Resolve, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="disagree"):
        reference("org/name@v1", "v2")
    with pytest.raises(UsageError, match="no revisions"):
        reference(str(tmp_path), "v2")
    with pytest.raises(UsageError, match="pinned by hash"):
        reference("tiny-wheel", "v2")


@pytest.mark.parametrize("end", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_sec04_a_pickle_by_name_is_refused(end: str, reference: Resolve, tmp_path: Path) -> None:
    path = tmp_path / f"model.{end}"
    path.write_bytes(b"x")
    with pytest.raises(ModelFileError, match="pickle"):
        reference(str(path))
    with pytest.raises(ModelFileError, match="pickle"):
        reference(f"org/name/model.{end}")
