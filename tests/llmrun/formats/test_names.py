"""Plain names stay plain on every system."""

import pytest

from llmrun.formats.names import is_plain


@pytest.mark.parametrize(
    "name", ["config.json", "a b.txt", "..x", "console", "com.txt", "\u00fc.json"]
)
def test_plain(name: str) -> None:
    assert is_plain(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "a\\b",
        "c:",
        "a:stream",
        "a.",
        "a ",
        "nul",
        "NUL.txt",
        "lpt9.x",
        "a\n",
        "a\x00",
        "con",
        "a\u202eb",
        "a?",
        "CONIN$",
    ],
)
def test_not_plain(name: str) -> None:
    assert not is_plain(name)


def test_the_length_is_bounded() -> None:
    assert is_plain("x" * 255)
    assert not is_plain("x" * 256)
