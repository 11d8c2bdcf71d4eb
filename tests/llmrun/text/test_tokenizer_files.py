"""A folder made from a GGUF is read as the GGUF itself, by llmrun and by the reference."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmrun.text.folder_tokenizer import read_tokenizer_config
from llmrun.text.message import Message
from llmrun.text.prompt import encode_chat
from llmrun.text.template import ChatTemplate, FoundTemplate, find_template, gguf_template
from llmrun.text.tokenizer import Tokenizer
from llmrun.text.tokenizer_files import tokenizer_files

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [Message("system", "Be brief. <s>"), Message("user", " Hé <|im_end|> 12 🦀")]

# Family, kind of tokenizer, split rule, architecture, whether a BOS is put before a text.
KINDS = {
    "llama-bpe": ("llama3", "gpt2", "llama-bpe", "llama", True),
    "smollm": ("gpt2", "gpt2", "smollm", "llama", False),
    "qwen2": ("qwen2", "gpt2", "qwen2", "qwen2", False),
    "sentencepiece": ("mistral", "llama", None, "llama", True),
    "sentencepiece, phi3": ("llama2", "llama", None, "phi3", True),
    "sentencepiece, gemma3": ("gemma", "llama", None, "gemma3", True),
}
# What files in the wild add or leave out.
CHANGES: Mapping[str, Mapping[str, object]] = {
    "as is": {},
    "flag on": {"tokenizer.ggml.add_bos_token": True},
    "flag off": {"tokenizer.ggml.add_bos_token": False},
    "no bos": {"tokenizer.ggml.bos_token_id": None},
    "no eos": {"tokenizer.ggml.eos_token_id": None},
    "no template": {"tokenizer.chat_template": None},
    "no types": {"tokenizer.ggml.token_type": None},
    "padding out of range": {"tokenizer.ggml.padding_token_id": 2**32 - 1},
}


@pytest.fixture(params=sorted(KINDS))
def kind(
    request: pytest.FixtureRequest, make_family: Any, write_gguf: Any, read_metadata: Any
) -> tuple[dict[str, Any], bool]:
    """Metadata of a GGUF without any flag, and whether a BOS is the default of its kind."""
    family, model, pre, architecture, adds_bos = KINDS[request.param]
    metadata = read_metadata(write_gguf(make_family(family), model, pre, architecture))
    metadata["tokenizer.chat_template"] = TEMPLATE
    return metadata, adds_bos


def _write(metadata: Mapping[str, object], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in tokenizer_files(metadata).items():
        (folder / name).write_bytes(data)


def _chat_ids(tokenizer: Tokenizer, found: FoundTemplate) -> list[int]:
    bos = None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
    with ChatTemplate(found.source, bos) as template:
        return encode_chat(tokenizer, template, CHAT)


def _assert_same(gguf: Tokenizer, folder: Tokenizer, lines: list[str]) -> None:
    assert (folder.bos_id, folder.eos_id, folder.add_bos) == (
        gguf.bos_id,
        gguf.eos_id,
        gguf.add_bos,
    )
    assert folder.special_tokens == gguf.special_tokens
    assert folder.hidden_ids == gguf.hidden_ids
    assert folder.n_ids == gguf.n_ids
    for line in lines:
        ids = gguf.encode_plain(line)
        assert folder.encode_plain(line) == ids, line
        assert folder.decode(ids) == gguf.decode(ids)
        text = f"<s>{line}<|im_end|> {line}</s>"
        assert folder.encode_with_specials(text) == gguf.encode_with_specials(text)


def test_the_folder_reads_as_the_gguf(
    kind: tuple[dict[str, Any], bool], tmp_path: Path, lines: list[str]
) -> None:
    metadata, adds_bos = kind
    for name, change in CHANGES.items():
        changed = {key: v for key, v in {**metadata, **change}.items() if v is not None}
        _write(changed, tmp_path / name)
        gguf, folder = Tokenizer.from_gguf(changed), Tokenizer.from_folder(tmp_path / name)
        _assert_same(gguf, folder, lines[:40])
        default = {"flag on": True, "flag off": False, "no bos": False}
        assert folder.add_bos == default.get(name, adds_bos), name
        assert folder.eos_ids == gguf.eos_ids & {gguf.eos_id}
        found = find_template(tmp_path / name, read_tokenizer_config(tmp_path / name))
        assert found.source == gguf_template(changed).source
        if name in ("as is", "no template"):
            ids = _chat_ids(folder, found)
            assert ids == _chat_ids(gguf, gguf_template(changed))
            assert ids[:2].count(gguf.bos_id) == 1


def test_the_reference_puts_the_same_bos(
    kind: tuple[dict[str, Any], bool], tmp_path: Path, lines: list[str]
) -> None:
    from transformers import AutoTokenizer

    metadata, adds_bos = kind
    _write(metadata, tmp_path)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (oracle.bos_token_id, oracle.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    start = [tokenizer.bos_id] if adds_bos else []
    for line in lines[:20]:
        assert oracle(line)["input_ids"] == start + tokenizer.encode_plain(line), line
        assert oracle.decode(tokenizer.encode_plain(line)) == tokenizer.decode(
            tokenizer.encode_plain(line)
        )


def test_all_ids_that_end_an_answer_are_in_the_generation_config(
    kind: tuple[dict[str, Any], bool], tmp_path: Path
) -> None:
    from transformers import GenerationConfig

    metadata, _ = kind
    tokens = metadata["tokenizer.ggml.tokens"]
    im_end, think = tokens.index("<|im_end|>"), tokens.index("<|think|>")
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    _write(metadata | {"tokenizer.ggml.eom_token_id": think}, tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    assert config.eos_token_id == sorted([eos, im_end, think])
    assert config.bos_token_id == bos


def test_ids_that_the_gguf_does_not_name_are_left_out() -> None:
    bare = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    files = tokenizer_files({f"tokenizer.ggml.{name}": value for name, value in bare.items()})
    assert json.loads(files["generation_config.json"]) == {}
    config = json.loads(files["tokenizer_config.json"])
    assert not [name for name in config if name in ("bos_token", "eos_token", "unk_token")]
    assert sorted(files) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def test_the_unknown_token_is_named_and_is_no_word() -> None:
    pieces = ["<unk>", "<s>", "▁", "a", "<unk", ">", "<", "u", "n", "k"]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * len(pieces),
        "tokenizer.ggml.token_type": [2, 3, *[1] * 8],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }
    config = json.loads(tokenizer_files(metadata)["tokenizer_config.json"])
    assert (config["unk_token"], config["pad_token"]) == ("<unk>", "<unk>")
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.special_tokens == {"<unk>": 0, "<s>": 1}
    assert 0 not in tokenizer.encode_plain("<unk>")


def test_the_starter_reads_back_the_same(
    starter_metadata: dict[str, Any], starter: Tokenizer, tmp_path: Path, lines: list[str]
) -> None:
    _write(starter_metadata, tmp_path)
    folder = Tokenizer.from_folder(tmp_path)
    _assert_same(starter, folder, lines)
    assert (folder.bos_id, folder.eos_id, folder.add_bos) == (1, 2, False)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [0, 2]}
    found = find_template(tmp_path, read_tokenizer_config(tmp_path))
    assert found.source == starter_metadata["tokenizer.chat_template"]
    assert _chat_ids(folder, found) == _chat_ids(starter, gguf_template(starter_metadata))
