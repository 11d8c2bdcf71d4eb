"""What the user may have given, and what each is answered."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.errors import ModelFileError, ModelNotFoundError
from llmrun.formats.open import known_formats, open_checkpoint

Folder = Callable[..., Path]


def test_every_format_module_is_found() -> None:
    assert set(known_formats()) >= {"safetensors", "compressed-tensors", "gguf"}


def test_absent_is_exit_3(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "is empty"),
        (["model.safetensors"], "no config.json"),
        (["x.gguf"], "x.gguf"),
        (["pytorch_model.bin"], "never reads"),
        (["config.json", "pytorch_model-00001-of-00002.bin"], "never reads"),
        (["config.json"], "no safetensors file"),
    ],
)
def test_folders_that_are_no_models(files: list[str], words: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelFileError, match=words) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.exit_code == 5
    assert caught.value.next_step


def test_of_a_split_gguf_the_first_part_is_named(tmp_path: Path) -> None:
    names = [f"{stem}-0000{n}-of-00003.gguf" for stem in "ab" for n in (1, 2, 3)]
    for name in (*names, "c.gguf"):
        (tmp_path / name).write_text("")
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(tmp_path)
    firsts = ", ".join(str(tmp_path / name) for name in (names[0], names[3], "c.gguf"))
    assert caught.value.next_step == f"Name one of them: {firsts}."
    for name in (names[0], *names[3:], "c.gguf"):
        (tmp_path / name).unlink()
    with pytest.raises(ModelFileError) as incomplete:
        open_checkpoint(tmp_path)
    assert names[1] in incomplete.value.next_step


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w.bin", "never reads"),
        ("w.ckpt", "never reads"),
        ("model.safetensors", "config.json"),
        ("notes.txt", "no model file"),
        ("x.gguf", "magic at byte 0"),
    ],
)
def test_files_that_are_no_models(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("hello")
    with pytest.raises(ModelFileError, match=words):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "not valid JSON"),
        ('{"quantization_config": 4}', "not an object"),
        ('{"a": [' + "{}," * 50_000 + "{}]}", "over 20,000"),
    ],
)
def test_damaged_config(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=words):
        open_checkpoint(tmp_path)


def test_an_unknown_quantization_lists_the_known_ones(folder: Folder) -> None:
    made = folder({"quantization_config": {"quant_method": "hqq\x1b[2J"}})
    with pytest.raises(
        ModelFileError, match=r"Known: .*compressed-tensors, fp8, gguf, .*safetensors"
    ) as caught:
        open_checkpoint(made)
    assert "\x1b" not in str(caught.value)


def test_a_gguf_is_known_by_its_magic(tmp_path: Path) -> None:
    path = tmp_path / "sha256-abc"
    path.write_bytes(b"GGUF\1\0\0\0")
    with pytest.raises(ModelFileError, match="version 1"):
        open_checkpoint(path)
