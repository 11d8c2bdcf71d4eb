"""The name check, on the forty kinds of names that have broken other tools."""

import pytest

from llmrun.store import names

HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "a/../b",
    "a/..",
    "..\\x",
    "a\\b",
    "/abs",
    "//unc/share",
    "\\\\unc\\share",
    "C:",
    "C:\\x",
    "C:x",
    "~",
    "~root",
    "-flag",
    ".hidden",
    "_x/..",
    "a..b",
    "name.",
    "name ",
    " name",
    "con",
    "CON",
    "NUL.txt",
    "com1",
    "LPT9.gguf",
    "a:stream",
    "a\0b",
    "a\nb",
    "a\x1b[31m",
    "%2e%2e",
    "%2e%2e%2fx",
    "a%00b",
    "x" * 97,
    "n\u0101me",
    "\u2025/x",
    "\uff0e\uff0e/x",
    "a|b",
    "a*b",
    "a?b",
    'a"b',
]


@pytest.mark.parametrize("name", HOSTILE)
def test_sec09_hostile_names_are_refused(name: str) -> None:
    assert not names.is_part(name)
    assert not names.is_repo(f"org/{name}")
    assert not names.is_repo(f"{name}/model")
    assert not names.is_file(name) or name == "x" * 97  # a file's name may be longer


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "a", "9", "x" * 96, "SmolLM2-135M.v1_a", "console"])
def test_ordinary_names_pass(name: str) -> None:
    assert names.is_part(name)
    assert names.is_repo(f"org/{name}")
    assert names.is_file(name)


@pytest.mark.parametrize("name", ["main", "v1.0", "refs/pr/3", "a" * 40])
def test_revisions_pass(name: str) -> None:
    assert names.is_revision(name)


@pytest.mark.parametrize("name", ["", "-x", "/x", "x/", "a//b", "a/../b", "a b", "a\n", "x" * 129])
def test_bad_revisions_are_refused(name: str) -> None:
    assert not names.is_revision(name)


def test_digests_are_exact() -> None:
    assert names.is_sha256("0a" * 32)
    assert not names.is_sha256("0A" * 32)
    assert not names.is_sha256("0a" * 32 + "\n")
    assert not names.is_sha256("0a" * 31)
    assert names.is_commit("0a" * 20)
    assert not names.is_commit("0a" * 20 + "/..")


def test_slugs_keep_look_alikes_apart() -> None:
    alike = ["org/Name", "org/name", "org--name", "or/g-name", "org/name.", "org/name "]
    slugs = {names.slug(name) for name in alike}
    assert len(slugs) == len(alike)
    assert len({slug.lower() for slug in slugs}) == len(alike)
    assert all(names.is_part(slug) for slug in slugs)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("m.gguf", ["m.gguf"]),
        ("m-00001-of-00001.gguf", ["m-00001-of-00001.gguf"]),
        ("m-00002-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        ("m-00003-of-00002.gguf", ["m-00003-of-00002.gguf"]),
        ("m-00000-of-00002.gguf", ["m-00000-of-00002.gguf"]),
        ("m-00001-of-01025.gguf", ["m-00001-of-01025.gguf"]),
        ("m-00001-of-99999.gguf", ["m-00001-of-99999.gguf"]),
        ("m-1-of-2.gguf", ["m-1-of-2.gguf"]),
        ("m-00001-of-00002.bin", ["m-00001-of-00002.bin"]),
    ],
)
def test_parts_of_split_models(name: str, parts: list[str]) -> None:
    assert names.parts_of(name) == parts
    assert names.first_part_of(name) == parts[0]
