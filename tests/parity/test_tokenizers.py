"""A tokenizer read from a GGUF equals its model's own on ten thousand lines of mixed text.

Real vocabularies against transformers' reading of the same file; the split rules of families whose
vocabularies are not at hand against the published patterns, read by another regex library.
"""

import importlib.util
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import regex
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from llmrun.formats.gguf import open_gguf
from llmrun.text.gguf_tokenizer import read_gguf_vocabulary
from llmrun.text.spelling import byte_alphabet
from llmrun.text.splits import SPLITS
from llmrun.text.tokenizer import Tokenizer, gguf_tokenizer_json

# transformers gives Gemma's runs of white space another order than Gemma's own tokenizer.json.
_LONG_RUN = re.compile(r"( |\t|\n)\1{15,}")

# The patterns as the models' tokenizer.json files spell them, one after another.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
_MINICPM = _CL100K.replace("{1,3}", "+")
_SEED = _CL100K.replace("{1,3}", "{1}").replace(
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"
)
PUBLISHED: dict[str, tuple[tuple[str, ...], str | None]] = {
    "gpt-2": ((_GPT2,), None),
    "mpt": ((_GPT2,), "NFC"),
    "smollm": ((r"\p{N}", _GPT2), None),
    "command-r": ((r"\p{N}", _GPT2), "NFC"),
    "exaone": ((r"\p{N}", _GPT2), "NFKC"),
    "llama-bpe": ((_CL100K,), None),
    "glm4": ((_CL100K,), None),
    "dbrx": ((_CL100K,), None),
    "minicpm5": ((r"\p{N}{1,3}", _MINICPM), None),
    "seed-coder": ((_SEED,), "NFC"),
    "qwen2": ((_CL100K.replace("{1,3}", ""),), "NFC"),
    "qwen35": ((_QWEN35,), "NFC"),
    "tekken": ((_TEKKEN,), None),
    "gpt-4o": ((_O200K,), None),
    "deepseek-coder": ((*_CODER, r"\p{N}"), None),
    "deepseek-v3": ((r"\p{N}{1,3}", _CJK, _V3), None),
}


@pytest.fixture(scope="module")
def mixed_text() -> ModuleType:
    path = Path(__file__).parents[1] / "support" / "mixed_text.py"
    spec = importlib.util.spec_from_file_location("mixed_text", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metadata_of(path: Path) -> Mapping[str, Any]:
    return open_gguf(path).config


def theirs_of(path: Path) -> tokenizers.Tokenizer:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    kind, tokens, _ = get_gguf_tokenizer(str(path))
    backend: tokenizers.Tokenizer = convert_gguf_tokenizer(kind, tokens)[0]
    return backend


def check_equal(ours: Tokenizer, theirs: tokenizers.Tokenizer, lines: Sequence[str]) -> None:
    """Special strings parsed, and not parsed: then no control id may come out."""
    wanted = theirs.encode_batch(lines, add_special_tokens=False)
    different = [
        line
        for line, encoding in zip(lines, wanted, strict=True)
        if ours.encode_with_specials(line) != encoding.ids
    ]
    assert not different, (len(different), different[:3])
    leaking = [line for line in lines if not ours.special_ids.isdisjoint(ours.encode_plain(line))]
    assert not leaking, (len(leaking), leaking[:3])


@pytest.mark.slow
def test_the_starter_equals_the_reference(starter_gguf: Path, mixed_text: ModuleType) -> None:
    ours, theirs = Tokenizer.from_gguf(metadata_of(starter_gguf)), theirs_of(starter_gguf)
    theirs.pre_tokenizer = pre_tokenizers.Sequence(  # a rule that transformers leaves out
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    check_equal(ours, theirs, mixed_text.mixed_lines(specials=list(ours.special_tokens)))


@pytest.mark.slow
def test_gemma_equals_the_reference(gemma_gguf: Path, mixed_text: ModuleType) -> None:
    metadata = metadata_of(gemma_gguf)
    ours = Tokenizer.from_gguf(metadata)
    specials = [
        "<bos>",
        "<eos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<unused7>",
        "</b>",
        "<table>",
    ]
    lines = mixed_text.mixed_lines(specials=specials)
    unknown = ours.special_tokens["<unk>"]
    assert all(unknown not in ours.encode_plain(line) for line in lines[:500])
    check_equal(ours, theirs_of(gemma_gguf), [ln for ln in lines if not _LONG_RUN.search(ln)])
    for white in (" ", "\n", "\t"):  # as SentencePiece: the longest run of its own first
        texts = [ours.token_text(i).replace("\u2581", " ") for i in ours.encode_plain(white * 33)]
        assert texts == [white * 31, white * 2]
    ends = {ours.special_tokens[text] for text in ("<eos>", "<end_of_turn>")}
    assert (ours.eos_ids, ours.add_bos) == (ends, True)


@pytest.mark.large
def test_qwen_equals_the_reference(qwen_gguf: Path, mixed_text: ModuleType) -> None:
    ours = Tokenizer.from_gguf(metadata_of(qwen_gguf))
    theirs = theirs_of(qwen_gguf)
    theirs.normalizer = normalizers.NFC()  # as in Qwen's tokenizer.json; transformers leaves it out
    check_equal(ours, theirs, mixed_text.mixed_lines(specials=list(ours.special_tokens)))


def bytes_only(name: str) -> tokenizers.Tokenizer:
    """A vocabulary of the 256 bytes with the rule ``name``, as other tools would read it."""
    letters = list(byte_alphabet())
    metadata = {"model": "gpt2", "pre": name, "tokens": [*letters, "\u0120a"]}
    metadata |= {"merges": ["\u0120 a"]}
    made = read_gguf_vocabulary({f"tokenizer.ggml.{key}": v for key, v in metadata.items()})
    return tokenizers.Tokenizer.from_str(gguf_tokenizer_json(made))


def pieces(text: str, patterns: Sequence[str]) -> list[str]:
    """``text`` cut by each pattern in turn; what lies between matches stays whole."""
    parts = [text]
    for pattern in map(regex.compile, patterns):
        cut = []
        for part in parts:
            end = 0
            for match in pattern.finditer(part):
                cut += [part[end : match.start()], match[0]]
                end = match.end()
            cut.append(part[end:])
        parts = [part for part in cut if part]
    return parts


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_split_rule_is_the_published_one(name: str, mixed_text: ModuleType) -> None:
    patterns, normal_form = PUBLISHED[name]
    backend = bytes_only(name)
    settings = json.loads(backend.to_str())
    assert settings["normalizer"] == (normal_form and {"type": normal_form})
    assert settings["model"]["ignore_merges"] == (name in ("llama-bpe", "glm4", "tekken"))
    alphabet = byte_alphabet()
    for line in mixed_text.mixed_lines(1500):
        # The two regex libraries know different versions of Unicode.
        text = "".join(c for c in line if unicodedata.category(c) != "Cn")
        cut = backend.pre_tokenizer.pre_tokenize_str(text)
        ours = [bytes(map(alphabet.__getitem__, piece)).decode() for piece, _ in cut]
        assert ours == pieces(text, patterns), (name, text)


def test_names_of_one_rule_share_it() -> None:
    assert SPLITS["refact"] is SPLITS["starcoder"] is SPLITS["smollm"]
    assert SPLITS["llama3"] is SPLITS["llama-v3"] is SPLITS["llama-bpe"]
    assert SPLITS["chatglm-bpe"] is SPLITS["glm4"]
    assert SPLITS["olmo"] is SPLITS["mpt"]


def test_falcon_cuts_digits_by_three_after_writing_bytes() -> None:
    cut = bytes_only("falcon").pre_tokenizer.pre_tokenize_str("it's 12345 (x)... \u00bd")
    assert [piece for piece, _ in cut] == [
        *(
            "it",
            "'",
            "s",
            "\u0120",
            "123",
            "45",
            "\u0120",
            "(",
            "x",
            ")...",
            "\u0120\u00c2",
            "\u00bd",
        )
    ]
