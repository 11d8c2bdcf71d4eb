"""Encoding and decoding equal the reference for every family; words never become control ids."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from llmrun.errors import ModelFileError
from llmrun.text import limits
from llmrun.text.tokenizer import Tokenizer


def _reference(oracle: Any, text: str) -> list[int]:
    ids: list[int] = oracle(text, add_special_tokens=False)["input_ids"]
    return ids


def test_plain_text_encodes_as_the_reference(family: Any, lines: list[str]) -> None:
    for line in lines:
        assert family.tokenizer.encode_plain(line) == _reference(family.oracle, line), line


def test_special_text_encodes_as_the_reference(
    family: Any, lines: list[str], special_strings: list[str]
) -> None:
    rng = random.Random(3)
    known = [s for s in special_strings if s in family.tokenizer.special_tokens]
    for line in lines:
        half = len(line) // 2
        text = line[:half] + rng.choice(known) + rng.choice(["", " ", "\n "]) + line[half:]
        text += rng.choice(known)
        assert family.tokenizer.encode_with_specials(text) == _reference(family.oracle, text), text


def test_decode_equals_the_reference(family: Any, lines: list[str]) -> None:
    for line in lines:
        ids = _reference(family.oracle, f"<s>{line}<|im_end|>{line}")
        for skip in (True, False):
            expected = family.oracle.decode(ids, skip_special_tokens=skip)
            assert family.tokenizer.decode(ids, skip_special=skip) == expected, line


@pytest.mark.parametrize("name", ["gpt2", "llama3", "unigram"])
def test_decode_of_any_ids_equals_the_reference(
    name: str, make_family: Callable[[str], Any]
) -> None:
    family = make_family(name)
    rng = random.Random(5)
    for _ in range(300):
        ids = [rng.randrange(family.oracle.vocab_size) for _ in range(rng.randrange(1, 12))]
        expected = family.oracle.decode(ids, skip_special_tokens=True)
        assert family.tokenizer.decode(ids) == expected, ids


def test_r044_r045_special_strings_as_words_give_no_special_id(
    family: Any, lines: list[str]
) -> None:
    tokenizer = family.tokenizer
    rng = random.Random(9)
    strings = list(tokenizer.special_tokens)
    unknown = tokenizer.special_tokens.get("<unk>")
    for string in strings:
        for text in (string, f"a {string} b", string * 3, f"{string[:3]}{string}"):
            ids = tokenizer.encode_plain(text)
            assert not tokenizer.special_ids - {unknown} & set(ids), (text, ids)
            if family.name != "unigram":  # its reference has no piece for some characters
                assert tokenizer.decode(ids).strip() == text.strip()
                assert unknown not in ids
    for line in rng.sample(lines, 100):
        text = line + rng.choice(strings) + line
        assert not tokenizer.special_ids - {unknown} & set(tokenizer.encode_plain(text))


def test_r045_every_special_string_of_the_starter(starter: Tokenizer) -> None:
    assert len(starter.special_tokens) == 17
    for string in starter.special_tokens:
        ids = starter.encode_plain(f"say {string} now")
        assert not starter.special_ids & set(ids)
        assert starter.decode(ids) == f"say {string} now"


def test_starter_equals_the_reference(
    starter: Tokenizer, starter_oracle: Any, lines: list[str]
) -> None:
    for line in lines:
        ids = starter.encode_plain(line)
        assert ids == _reference(starter_oracle, line), line
        assert starter.decode(ids) == line
        text = f"<|im_start|>user\n{line}<|im_end|>\n"
        assert starter.encode_with_specials(text) == _reference(starter_oracle, text)
    assert (starter.n_ids, starter.bos_id, starter.add_bos) == (49152, 1, False)
    assert starter.eos_id == 2
    assert starter.eos_ids == {0, 2}  # <|endoftext|> ends an answer too


def test_starter_from_its_folder_equals_the_reference(
    starter_oracle: Any, tmp_path: Path, lines: list[str]
) -> None:
    starter_oracle.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for line in lines:
        assert tokenizer.encode_plain(line) == _reference(starter_oracle, line), line
    assert tokenizer.eos_ids == {2}
    assert tokenizer.bos_id == 1


def test_starter_is_built_fast(starter_metadata: dict[str, Any]) -> None:
    start = time.process_time()
    Tokenizer.from_gguf(starter_metadata)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("name", "pre"), [("gpt2", "gpt-2"), ("llama3", "llama-bpe"), ("qwen2", "qwen2")]
)
def test_byte_level_gguf_equals_the_folder(
    name: str, pre: str, make_family: Any, write_gguf: Any, read_metadata: Any, lines: list[str]
) -> None:
    family = make_family(name)
    tokenizer = Tokenizer.from_gguf(read_metadata(write_gguf(family, "gpt2", pre)))
    for line in lines:
        expected = _reference(family.oracle, line)
        assert tokenizer.encode_plain(line) == expected, line
        assert tokenizer.decode(expected) == family.tokenizer.decode(expected)
    assert tokenizer.special_tokens == family.tokenizer.special_tokens
    assert tokenizer.hidden_ids == family.tokenizer.hidden_ids
    assert tokenizer.add_bos == (name == "llama3")


@pytest.mark.parametrize(
    ("name", "architecture"), [("mistral", "llama"), ("llama2", "phi3"), ("gemma", "gemma3")]
)
def test_sentencepiece_gguf_equals_the_reference(
    name: str,
    architecture: str,
    make_family: Any,
    write_gguf: Any,
    read_metadata: Any,
    lines: list[str],
) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = write_gguf(make_family(name), "llama", architecture=architecture)
    tokenizer = Tokenizer.from_gguf(read_metadata(path))
    kind, tokens, _ = get_gguf_tokenizer(str(path))
    oracle, _ = convert_gguf_tokenizer(kind, tokens)
    for line in lines:
        ids = oracle.encode(line, add_special_tokens=False).ids
        assert tokenizer.encode_plain(line) == ids, line
        assert tokenizer.decode(ids) == oracle.decode(ids)
        text = f"<s>{line}</s> {line}"
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_with_specials(text) == expected, line
    assert tokenizer.add_bos


def test_sentencepiece_gguf_recovers_the_merges(
    make_family: Any, write_gguf: Any, read_metadata: Any, lines: list[str]
) -> None:
    family = make_family("mistral")
    tokenizer = Tokenizer.from_gguf(read_metadata(write_gguf(family, "llama")))
    for line in lines:
        assert tokenizer.encode_plain(line) == _reference(family.oracle, line), line


def test_unflagged_tags_are_special_but_shown(make_family: Callable[[str], Any]) -> None:
    tokenizer = make_family("qwen2").tokenizer
    think = tokenizer.special_tokens["<think>"]
    assert think in tokenizer.special_ids - tokenizer.hidden_ids
    assert tokenizer.decode([think]) == "<think>"
    assert think not in tokenizer.encode_plain("<think>")
    gemma = make_family("gemma").tokenizer
    assert "<table>" not in gemma.special_tokens
    assert "\n\n" not in gemma.special_tokens


def test_token_text_spells_and_unknown_ids_are_empty(starter: Tokenizer) -> None:
    (the,) = starter.encode_plain(" the")
    assert starter.token_text(the) == "Ġthe"
    assert starter.token_text(starter.n_ids + 5) == ""
    assert starter.decode([the, starter.n_ids + 5]) == " the"


def test_names_may_come_from_the_special_tokens_map(make_family: Any, tmp_path: Path) -> None:
    source = make_family("llama3").folder / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_id == tokenizer.special_tokens["<s>"]
    assert tokenizer.eos_ids == {tokenizer.special_tokens["</s>"]}
    assert tokenizer.add_bos


def test_tokens_only_in_the_config_are_added(make_family: Any, tmp_path: Path) -> None:
    source = make_family("gpt2")
    (tmp_path / "tokenizer.json").write_bytes((source.folder / "tokenizer.json").read_bytes())
    n = source.tokenizer.n_ids
    entry = {"content": "<|tool|>", "special": True, "lstrip": False, "rstrip": False}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": {str(n): entry}}))
    assert Tokenizer.from_folder(tmp_path).special_tokens["<|tool|>"] == n
    config.write_text(json.dumps({"added_tokens_decoder": {str(n + 7): entry}}))
    with pytest.raises(ModelFileError, match="foreign id"):
        Tokenizer.from_folder(tmp_path)


def test_characters_without_a_token_are_reported(
    starter: Tokenizer, starter_metadata: dict[str, Any], lines: list[str]
) -> None:
    tokens = set(starter_metadata["tokenizer.ggml.tokens"])
    # How byte-level vocabularies write the control bytes: U+0100 and up.
    missing = {chr(byte) for byte in range(0x20) if chr(0x100 + byte) not in tokens}
    assert "\x16" in missing
    text = "".join(chr(byte) for byte in range(0x20)) + "plain é 敏 🦀"
    assert starter.unencodable(text) == missing
    assert starter.decode(starter.encode_plain("a\x16b")) == "ab"
    for line in lines:
        assert starter.unencodable(line) == frozenset(set(line) & missing)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2", "llama2", "mistral", "gemma"])
def test_a_vocabulary_with_all_bytes_spells_everything(
    name: str, make_family: Callable[[str], Any], lines: list[str]
) -> None:
    tokenizer = make_family(name).tokenizer
    assert tokenizer.unencodable("".join(lines) + "\x00\x16\ufffd\U0010ffff") == frozenset()


def test_a_vocabulary_without_bytes_reports_unknown_characters(make_family: Any) -> None:
    tokenizer = make_family("unigram").tokenizer
    assert tokenizer.unencodable("The quick brown fox ﬁ") == frozenset()  # NFKC: fi
    assert tokenizer.unencodable("fox \x16 ☃ ☃") == {"\x16", "☃"}


def test_a_damaged_character_is_reported_and_a_missing_byte_with_a_piece_is_not() -> None:
    pieces = ["<unk>", "▁", "a", "é", "<0xC3>", "<0xA8>"]
    metadata = {"model": "llama", "tokens": pieces, "scores": [0.0] * 6, "unknown_token_id": 0}
    metadata |= {"token_type": [2, 1, 1, 1, 6, 6]}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    assert tokenizer.unencodable("a éèâ") == {"â"}
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "Ã"],
        "merges": ["a a"],
    }  # é is Ã ©
    metadata["tokens"] = ["a", "Ã", "aa"]
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    assert tokenizer.unencodable("aaé") == {"é"}


def _word_level() -> str:
    return Backend(models.WordLevel({"a": 0}, unk_token="a")).to_str()


def _no_decoder() -> str:
    return Backend(models.BPE({"a": 0}, [])).to_str()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"model": ' * 5000,
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        _word_level(),
        _no_decoder(),
    ],
)
def test_damaged_tokenizer_files_are_named_errors(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError):
        Tokenizer.from_folder(tmp_path)


def test_missing_and_oversized_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(_no_decoder())
    monkeypatch.setattr(limits, "TOKENIZER_FILE_BYTES", 10)
    with pytest.raises(ModelFileError, match="larger than 10 bytes"):
        Tokenizer.from_folder(tmp_path)


def test_too_many_ids_or_added_tokens(make_family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_family("gpt2").folder
    for name in ("VOCABULARY_IDS", "ADDED_TOKENS"):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, 4)
            with pytest.raises(ModelFileError, match="over the limit"):
                Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "bert"},
        {"model": None},
        {"pre": "never-heard-of"},
        {"tokens": None},
        {"tokens": [1, 2]},
        {"merges": ["ab"]},
        {"merges": ["a b c"]},
        {"merges": ["a zz"]},
        {"token_type": [1]},
        {"bos_token_id": 99},
        {"eos_token_id": "x"},
    ],
)
def test_damaged_gguf_tokenizers_are_named_errors(change: dict[str, Any]) -> None:
    good = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in (good | change).items()}
    with pytest.raises(ModelFileError):
        Tokenizer.from_gguf(metadata)


def test_an_unknown_split_rule_is_refused_by_name() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "viking"}
    with pytest.raises(ModelFileError, match="viking"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": ["a"]})
