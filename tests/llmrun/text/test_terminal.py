"""No control but newline and tab gets through, whatever the text and its chunks."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.text.limits import HIDDEN_TERMINAL_CHARACTERS
from llmrun.text.terminal import TerminalFilter, clean

HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

STRING_STARTS = [
    "\x1b]",
    "\x1bP",
    "\x1bX",
    "\x1b^",
    "\x1b_",
    "\x9d",
    "\x90",
    "\x98",
    "\x9e",
    "\x9f",
]
STRING_ENDS = ["\x07", "\x1b\\", "\x9c"]

SEQUENCES = [
    *(f"{start}0;title{end}" for start in STRING_STARTS for end in STRING_ENDS),
    "\x1b]52;c;aGVsbG8=\x07",
    "\x1b]8;;http://example.org\x1b\\",
    "\x1b[31m",
    "\x1b[2J",
    "\x1b[?1049h",
    "\x1b[38;2;1;2;3m",
    "\x1b[ q",
    "\x9b31m",
    "\x1bc",
    "\x1b7",
    "\x1b(B",
    "\x1b#8",
    "\x1b%G",
    "\x1b=",
    "\x1b\x1b[31m",
    "\r",
    "\b\b",
    "\x7f",
    "\x00\x07\x0b\x0c\x0e",
    "\u202e",
    "\u2066\u2069",
    "\x85",
]

CHUNKS = st.lists(
    st.one_of(
        st.sampled_from(["\x1b", "[", "]", "P", "\\", "\x07", "\x9c", "\x9b", "\n", "m", "\r"]),
        st.sampled_from(SEQUENCES),
        st.text(max_size=8),
    ),
    max_size=20,
)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_r024_r025_sequences_are_removed_at_every_border(sequence: str) -> None:
    text = f"a{sequence}b\tc\n"
    assert clean(text) == "ab\tc\n"
    for border in range(len(text) + 1):
        filter_ = TerminalFilter()
        shown = filter_.push(text[:border]) + filter_.push(text[border:]) + filter_.flush()
        assert shown == "ab\tc\n"


@settings(max_examples=500, deadline=None)
@given(CHUNKS)
def test_nothing_harmful_and_chunks_change_nothing(chunks: list[str]) -> None:
    filter_ = TerminalFilter()
    shown = "".join(filter_.push(chunk) for chunk in chunks) + filter_.flush()
    assert not HARMFUL.search(shown)
    assert shown == clean("".join(chunks))
    by_character = TerminalFilter()
    assert "".join(by_character.push(c) for c in "".join(chunks)) == shown


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_text_without_controls_is_unchanged(text: str) -> None:
    text = HARMFUL.sub("", text)
    assert clean(text) == text


@pytest.mark.parametrize("start", STRING_STARTS)
def test_r025_a_string_without_end_hides_one_line_at_most(start: str) -> None:
    assert clean(f"a{start}hidden\nshown") == "a\nshown"


@pytest.mark.parametrize("start", [*STRING_STARTS, "\x1b[", "\x9b"])
def test_a_sequence_without_end_hides_4_kib_at_most(start: str) -> None:
    shown = clean(start + "1" * (HIDDEN_TERMINAL_CHARACTERS + 100))
    assert 100 <= len(shown) <= 102


@pytest.mark.parametrize(
    "text", ["[/INST] [/b] [bold]", "[/]", "{x} %s {0.__class__}", "`rm -rf` !ls", "\\x1b[31m"]
)
def test_r006_r007_r008_markup_is_left_alone(text: str) -> None:
    for border in range(len(text)):
        filter_ = TerminalFilter()
        assert filter_.push(text[:border]) + filter_.push(text[border:]) == text
