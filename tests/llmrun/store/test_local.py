"""Folders and .gguf files are used in place."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.errors import ModelFileError, ModelNotFoundError, UsageError
from llmrun.store.derived import key_for
from llmrun.store.fetch import FetchSettings, fetch
from llmrun.store.progress import SilentProgress
from llmrun.store.reference import Reference
from llmrun.store.store import Store

OFFLINE = FetchSettings(offline=True)


def test_a_folder_is_used_in_place(
    tmp_path: Path, store: Store, reference: Callable[..., Reference]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"12345")
    (folder / "config.json").write_bytes(b"{}")
    model = fetch(reference(str(folder)), store, OFFLINE, SilentProgress())
    assert model.path == folder
    assert model.bytes == 7
    assert [record.path for record in model.files] == ["config.json", "model.safetensors"]
    assert not store.root.exists()


def test_a_gguf_file_is_used_in_place(
    tmp_path: Path, store: Store, reference: Callable[..., Reference]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    model = fetch(reference(str(path)), store, OFFLINE, SilentProgress())
    assert (model.path, model.source, model.bytes) == (path, "gguf", 4)


def test_a_link_that_the_user_names_is_followed(
    tmp_path: Path, store: Store, reference: Callable[..., Reference]
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "m.gguf")
    model = fetch(reference(str(tmp_path / "link.gguf")), store, OFFLINE, SilentProgress())
    assert model.path == tmp_path / "m.gguf"


def test_all_parts_of_a_split_model_belong_to_it(
    tmp_path: Path, store: Store, reference: Callable[..., Reference]
) -> None:
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    path = tmp_path / "m-00002-of-00002.gguf"
    model = fetch(reference(str(path)), store, OFFLINE, SilentProgress())
    assert (model.path, model.bytes) == (path, 8)
    assert [f.path for f in model.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    first = key_for(model, "int8")
    os.utime(tmp_path / "m-00001-of-00002.gguf", ns=(0, 0))
    assert key_for(model, "int8") != first
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    assert fetch(reference(str(path)), store, OFFLINE, SilentProgress()).bytes == 4


def test_what_is_gone_is_not_found(
    tmp_path: Path, store: Store, reference: Callable[..., Reference]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    known = reference(str(path))
    path.unlink()
    for settings in (OFFLINE, FetchSettings()):
        with pytest.raises(ModelNotFoundError):
            fetch(known, store, settings, SilentProgress())


@pytest.mark.parametrize("make_folder", [True, False])
def test_an_update_of_what_is_used_in_place_is_refused(
    make_folder: bool, tmp_path: Path, store: Store, reference: Callable[..., Reference]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="is used in place"):
        fetch(
            reference(str(tmp_path if make_folder else path)),
            store,
            FetchSettings(update=True),
            SilentProgress(),
        )


@pytest.mark.parametrize(
    ("name", "says"), [("pytorch_model.bin", "pickles"), ("a.txt", "no .safe")]
)
def test_folders_without_weights(
    name: str, says: str, tmp_path: Path, store: Store, reference: Callable[..., Reference]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_bytes(b"x")
    with pytest.raises(ModelFileError, match=says):
        fetch(reference(str(folder)), store, OFFLINE, SilentProgress())


def test_the_key_of_a_derived_artefact_follows_the_file(
    tmp_path: Path, store: Store, reference: Callable[..., Reference]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    known = reference(str(path))
    first = key_for(fetch(known, store, OFFLINE, SilentProgress()), "int8")
    assert key_for(fetch(known, store, OFFLINE, SilentProgress()), "int8") == first
    path.write_bytes(b"GGUFx")
    assert key_for(fetch(known, store, OFFLINE, SilentProgress()), "int8") != first
