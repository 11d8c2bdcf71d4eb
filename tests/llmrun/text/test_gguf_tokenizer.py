"""The tokenizer section of a GGUF as plain data."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.text.gguf_tokenizer import GgufVocabulary, read_gguf_vocabulary


def read(tokens: list[str], merges: list[str], **more: object) -> GgufVocabulary:
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges, **more}
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


def ends(control: list[str], pre: str = "gpt-2", **more: object) -> set[str]:
    tokens = ["a", *control]
    types = [1] + [3] * len(control)
    made = read(tokens, ["a a"], token_type=types, pre=pre, **more)
    return {tokens[index] for index in made.eos_ids}


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], {"<|endoftext|>", "<|im_end|>"}),
        (
            ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
            {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"},
        ),
        (["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"], {"<|END_OF_TURN_TOKEN|>"}),
        (["[|assistant|]", "[|endofturn|]"], {"[|endofturn|]"}),
        (["<s>", "</s>", "[INST]", "[/INST]"], {"</s>"}),
        (["<start_of_turn>", "<end_of_turn>"], {"<end_of_turn>"}),
        (["<|user|>", "<|end|>", "<|assistant|>"], {"<|end|>"}),
    ],
)
def test_turn_ends_of_the_families(control: list[str], expected: set[str]) -> None:
    assert ends(control) == expected


def test_the_format_of_gpt_oss_ends_at_return_or_call_not_at_a_part() -> None:
    control = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
    assert ends(control, pre="gpt-4o") == {"<|return|>", "<|call|>"}


def test_glm_ends_a_turn_by_opening_the_next() -> None:
    control = ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"]
    assert ends(control, pre="glm4") == {"<|endoftext|>", "<|user|>", "<|observation|>"}


def test_a_turn_end_typed_as_user_defined_counts_unless_it_is_a_tag() -> None:
    made = read(["a", "<|im_end|>", "</s>"], ["a a"], token_type=[1, 4, 4])
    assert made.eos_ids == {1}


def test_phi_markers_take_the_white_space_behind_them() -> None:
    tokens = ["a", "<|user|>", "<|end|>", "<|endoftext|>"]
    metadata = {"model": "gpt2", "pre": "gpt-4o", "tokens": tokens, "merges": ["a a"]}
    keys: dict[str, object] = {f"tokenizer.ggml.{key}": v for key, v in metadata.items()}
    keys |= {"tokenizer.ggml.token_type": [1, 3, 3, 3]}
    phi = read_gguf_vocabulary(keys | {"general.architecture": "phi3"})
    assert phi.strip_after == {"<|user|>", "<|end|>"}
    assert read_gguf_vocabulary(keys | {"general.architecture": "gpt-oss"}).strip_after == set()


def sentencepiece(tokens: list[str], scores: list[float], types: list[int]) -> GgufVocabulary:
    metadata = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    return read_gguf_vocabulary({f"tokenizer.ggml.{key}": v for key, v in metadata.items()})


def test_merges_come_best_score_first_and_user_defined_before_all() -> None:
    tokens = ["a", "b", "ab", "ba", "aba", "   ", "  ", " ", "\n\n", "\n"]
    scores = [-9.0, -9.0, -1.0, -2.0, -3.0, -1000.0, -1000.0, -9.0, -1000.0, -9.0]
    made = sentencepiece(tokens, scores, [1, 1, 1, 1, 1, 4, 4, 1, 4, 1])
    assert made.merges == [
        ("▁▁", "▁"),
        ("▁", "▁▁"),
        ("▁", "▁"),
        ("\n", "\n"),
        ("a", "b"),
        ("b", "a"),
        ("ab", "a"),
        ("a", "ba"),
    ]


def test_control_tokens_and_bytes_are_not_merged() -> None:
    tokens = ["<", "s>", "<s>", "<0x0", "A>", "<0x0A>"]
    assert sentencepiece(tokens, [0.0] * 6, [1, 1, 3, 1, 1, 6]).merges == []


def test_the_vocabulary_of_llama_2_has_a_space_before_every_span() -> None:
    tokens = [f"x{index}" for index in range(259)] + ["▁▁", "▁t", "er", "in"]
    scores = [-float(index) for index in range(len(tokens))]
    types = [1] * len(tokens)
    assert sentencepiece(tokens, scores, types).prefix_space == "always"
    tokens[260] = "▁▁▁▁"
    assert sentencepiece(tokens, scores, types).prefix_space == "first"


def test_a_file_that_does_not_name_its_rule_is_refused() -> None:
    good = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in good.items()}
    assert read_gguf_vocabulary(metadata).merges == [("a", "b")]
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(ModelFileError, match="does not say by which rule"):
        read_gguf_vocabulary(metadata)


@pytest.mark.parametrize("key", ["model", "pre"])
def test_a_name_from_the_file_is_shown_short_and_escaped(key: str) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    hostile = {f"tokenizer.ggml.{key}": "\u202e\x9b" + "\u00e9" * 100_000}
    with pytest.raises(ModelFileError) as caught:
        read_gguf_vocabulary(metadata | hostile)
    assert caught.value.what.isascii()
    assert len(caught.value.what) < 200
