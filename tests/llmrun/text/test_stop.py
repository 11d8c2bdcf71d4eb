"""Stop strings against a definition that looks at the whole text character by character."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.errors import UsageError
from llmrun.text.stop import StopMatcher, stop_token_ids
from llmrun.text.tokenizer import Tokenizer


def _definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first place where a stop string ends; of those that end there, the longest is cut."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    st.text("ab<|", max_size=24),
    st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_r032_r033_any_chunks_give_the_definition(
    text: str, stops: list[str], places: list[int]
) -> None:
    expected, stopped = _definition(text, stops)
    matcher = StopMatcher(stops)
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    shown = ""
    for a, b in pairwise(at):
        shown += matcher.push(text[a:b])
        assert expected.startswith(shown)
        if not matcher.stopped:
            held = text[len(shown) : b]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert shown + matcher.flush() == expected
    assert matcher.stopped == stopped


def test_r032_nothing_of_a_stop_in_four_tokens_is_shown() -> None:
    matcher = StopMatcher(["</stop>"])
    assert [matcher.push(piece) for piece in ("Hi", " </", "st", "op", "> more")] == [
        "Hi",
        " ",
        "",
        "",
        "",
    ]
    assert matcher.stopped
    assert matcher.push("after") == matcher.flush() == ""


def test_r033_inside_one_token() -> None:
    matcher = StopMatcher(["\n\nUser"])
    assert matcher.push("done.\n\nUser: next") == "done."
    assert matcher.stopped


def test_r034_only_true_prefixes_are_held() -> None:
    matcher = StopMatcher(["END" + "x" * 1000])
    assert matcher.push("a long text E") == "a long text "
    assert matcher.push("lephant") == "Elephant"
    assert matcher.push("EN") == ""
    assert matcher.flush() == "EN"
    assert not matcher.stopped


def test_r035_an_end_marker_written_as_ordinary_text_is_never_seen() -> None:
    text = "bye<|im_end|>\n"
    for border in range(len(text)):
        matcher = StopMatcher(["<|im_end|>"])
        assert matcher.push(text[:border]) + matcher.push(text[border:]) == "bye"
        assert matcher.stopped


def test_no_stops_pass_everything() -> None:
    assert StopMatcher([]).push("abc") == "abc"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError):
        StopMatcher(["a", ""])


def test_r048_stops_that_name_a_special_token_match_on_ids(starter: Tokenizer) -> None:
    assert stop_token_ids(starter, ["<|im_end|>", "###"]) == {2}
