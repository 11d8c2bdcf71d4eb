"""The text of a stream is the text of the whole; nothing half is ever shown."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.text.detokenizer import Detokenizer
from llmrun.text.spelling import Spelling, TextStream
from llmrun.text.tokenizer import Tokenizer


def _stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_r029_stream_equals_the_reference_decode(family: Any, lines: list[str]) -> None:
    for line in lines:
        ids = family.oracle(line, add_special_tokens=False)["input_ids"]
        expected = family.oracle.decode(ids, skip_special_tokens=True)
        assert "".join(_stream(family.tokenizer, ids)) == expected, line


def test_stream_of_random_ids_equals_the_whole(family: Any) -> None:
    """Any ids, also ones that make no sense: the stream is the decode, and holds at most a tail."""

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, family.tokenizer.n_ids + 3), max_size=30))
    def check(ids: list[int]) -> None:
        shown = _stream(family.tokenizer, ids)
        assert "".join(shown) == family.tokenizer.decode(ids)
        assert len(shown[-1]) <= 3

    check()


def test_r026_r027_emoji_is_shown_when_complete(make_family: Any) -> None:
    for name in ("gpt2", "llama2"):
        tokenizer = make_family(name).tokenizer
        ids = tokenizer.encode_plain("🦀🦜🐙🦑🦐")
        assert len(ids) >= 15
        shown = _stream(tokenizer, ids)
        assert "\ufffd" not in "".join(shown)
        assert [piece for piece in shown if piece.strip()] == ["🦀", "🦜", "🐙", "🦑", "🦐"]


def test_r027_a_bad_byte_does_not_take_back_what_was_shown(make_family: Any) -> None:
    tokenizer = make_family("gemma").tokenizer
    crab = [byte + 3 for byte in "🦀".encode()]
    assert "".join(_stream(tokenizer, [*crab, 0xC3 + 3, *crab])) == "🦀\ufffd🦀"


@pytest.mark.parametrize("start", [0xC3, 0xE2, 0xF0])
def test_r028_bytes_that_cannot_be_valid_are_given_up(start: int, make_family: Any) -> None:
    tokenizer = make_family("gemma").tokenizer
    a = tokenizer.encode_plain("a")
    shown = _stream(tokenizer, [start + 3, *a, *a])
    assert shown == ["", "\ufffda", "a", ""]
    assert _stream(tokenizer, [start + 3])[-1] == "\ufffd"


def test_r030_leading_space_is_dropped_once_and_only_once() -> None:
    stream = TextStream(Spelling(replacements=(("▁", " "),), strip_spaces=1))
    assert [stream.push(token) for token in ("▁", "▁word", "▁", "x")] == ["", " word", " ", "x"]


@pytest.mark.parametrize("every", [1, 2, 8, 1000])
def test_r031_flushing_in_groups_changes_nothing(every: int, make_family: Any) -> None:
    tokenizer = make_family("mistral").tokenizer
    ids = tokenizer.encode_plain("The quick brown fox jumps over the lazy dog, é 🦀 again.") * 3
    detokenizer = Detokenizer(tokenizer)
    groups = [ids[at : at + every] for at in range(0, len(ids), every)]
    text = "".join("".join(detokenizer.push(i) for i in group) for group in groups)
    assert text + detokenizer.flush() == tokenizer.decode(ids)


def test_hidden_ids_are_skipped_and_do_not_disturb_the_first_token(make_family: Any) -> None:
    for name in ("llama2", "unigram"):
        tokenizer = make_family(name).tokenizer
        ids = tokenizer.encode_with_specials("<s>brown fox</s>")
        assert "".join(_stream(tokenizer, ids)) == "brown fox"


def test_starter_streams_as_it_decodes(starter: Tokenizer, lines: list[str]) -> None:
    for line in lines[:120]:
        assert "".join(_stream(starter, starter.encode_plain(line))) == line
