"""The tokenizer section of a GGUF as plain data."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.text.gguf_tokenizer import GgufVocabulary, read_gguf_vocabulary


def read(tokens: list[str], merges: list[str], **more: object) -> GgufVocabulary:
    metadata = {"model": "gpt2", "tokens": tokens, "merges": merges, **more}
    return read_gguf_vocabulary({f"tokenizer.ggml.{key}": v for key, v in metadata.items()})


def test_of_equal_tokens_the_first_counts() -> None:
    assert read(["a", "b", "a", "c", "b"], ["a b"]).vocabulary == {"a": 0, "b": 1, "c": 3}


def test_merges_are_cut_at_their_space() -> None:
    assert read(["a", "b"], ["a b", "Ġ ä"]).merges == [("a", "b"), ("Ġ", "ä")]


@pytest.mark.parametrize("merge", ["ab", "a b c", " b", "a ", " ", "", "a  b"])
def test_a_merge_that_is_not_two_tokens_is_named(merge: str) -> None:
    with pytest.raises(ModelFileError, match="not two tokens") as refused:
        read(["a", "b"], ["a b", merge, "b a"])
    assert repr(merge) in str(refused.value)


def test_tokens_are_sorted_by_what_they_are() -> None:
    types = [1, 3, 4, 1, 3, 6]
    made = read(
        ["a", "<s>", "<tool>", "<e>", "", "<0x00>"], ["a a"], token_type=types, eos_token_id=3
    )
    assert made.control == ("<s>", "<e>")
    assert made.user_defined == ("<tool>",)
    assert (made.eos_id, made.eos_ids) == (3, frozenset({3}))


@pytest.mark.parametrize("tokens", [["a", 1], ["a", None], ["a", b"b"], "ab", []])
def test_a_list_of_anything_else_than_strings_is_refused(tokens: list[str]) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.tokens"):
        read(tokens, ["a b"])
