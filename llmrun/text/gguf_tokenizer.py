"""The tokenizer section of a GGUF as plain data: vocabulary, merges, split rules, special tokens.

Two kinds are read: ``gpt2`` (byte-level BPE, split rules by the name in ``tokenizer.ggml.pre``) and
``llama`` (SentencePiece BPE; its merges are recovered from the pieces and their scores). Any other
kind or split name is refused by name, since a near guess would quietly lower a model's quality.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from llmrun.errors import ModelFileError

T = TypeVar("T")

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_TWO = [True, True]

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# Control tokens that end a turn. Files of one model family differ in which of them they name as
# end of sequence; the others would run on after the answer.
_TURN_ENDS = frozenset(
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"]
)


@dataclass(frozen=True)
class Split:
    """How text is cut before merging. ``pattern`` None: the rule of GPT-2."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = Split()
_DIGITS = Split(single_digits=True)
_LLAMA_BPE = Split(_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN = Split(_QWEN2, nfc=True)
SPLITS: Mapping[str, Split] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
}


@dataclass(frozen=True)
class GgufVocabulary:
    """All a BPE tokenizer needs. ``split`` is None for SentencePiece, whose text is not cut.

    ``prefix_space``: ``first`` (a space mark before the text), ``always`` (before every span) or
    ``never``; SentencePiece only. ``control`` tokens are hidden in answers, ``user_defined`` not.
    ``eos_id``: the end of sequence the file names; ``eos_ids``: all ids that end an answer.
    """

    vocabulary: dict[str, int]
    merges: list[tuple[str, str]]
    split: Split | None
    prefix_space: str
    control: tuple[str, ...]
    user_defined: tuple[str, ...]
    unknown: str | None
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool


def read_gguf_vocabulary(metadata: Mapping[str, object]) -> GgufVocabulary:
    """Reads the ``tokenizer.ggml.*`` keys of a GGUF's metadata (full arrays, not counts).

    ModelFileError if they are missing, do not fit together, or are of an unsupported kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _sequence(metadata, "tokens", str)
    types = _sequence(metadata, "token_type", int, optional=True) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise _damaged(f"{len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        split = _split(str(metadata.get("tokenizer.ggml.pre", "default")))
        prefix_space, default_bos = "never", split.add_bos
        merges = _pairs(_sequence(metadata, "merges", str))
    elif kind == "llama":
        split, default_bos = None, True
        tokens, merges = _sentencepiece(metadata, tokens, types)
        prefix_space = _prefix_space(metadata)
    else:
        raise ModelFileError(
            f"The GGUF holds a tokenizer of the kind {kind!r}; llmrun reads 'gpt2' and 'llama'.",
            "Use the model's safetensors version (a folder with tokenizer.json).",
        )
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocabulary) < len(tokens):  # of equal tokens the first counts
        vocabulary = {token: index for index, token in reversed([*enumerate(tokens)])}
    bos_id, eos_id, unknown_id = (
        _id(metadata, f"{name}_token_id", len(tokens)) for name in ("bos", "eos", "unknown")
    )
    if split is not None:
        unknown_id = None  # bytes spell everything
    # What the file names as BOS, EOS or unknown is no word, whatever type it has there (``<unk>``
    # has one of its own, and files without types have none).
    named = {index for index in (bos_id, eos_id, unknown_id) if index is not None}
    control: list[str] = []
    user_defined: list[str] = []
    unusual = [index for index, token_type in enumerate(types) if token_type != _NORMAL]
    for index in sorted(named.union(unusual)):
        token, token_type = tokens[index], types[index]
        if token and (token_type == _CONTROL or index in named):
            control.append(token)
        elif token and token_type == _USER_DEFINED:
            user_defined.append(token)
    return GgufVocabulary(
        vocabulary=vocabulary,
        merges=merges,
        split=split,
        prefix_space=prefix_space,
        control=tuple(control),
        user_defined=tuple(user_defined),
        unknown=None if unknown_id is None else tokens[unknown_id],
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=_eos_ids(metadata, vocabulary, control, len(tokens)),
        add_bos=_flag(metadata, "add_bos_token", default_bos),
    )


def _split(name: str) -> Split:
    if name not in SPLITS:
        raise ModelFileError(
            f"The GGUF's tokenizer cuts text by the rule {name!r}, which llmrun does not know.",
            "Use the model's safetensors version (a folder with tokenizer.json).",
        )
    return SPLITS[name]


def _sentencepiece(
    metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]
) -> tuple[Sequence[str], list[tuple[str, str]]]:
    """Pieces as SentencePiece writes them, and the merges they imply, best first."""
    # Runs of spaces are stored as spaces in some files, though pieces write a space as a mark.
    tokens = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
    if str(metadata.get("general.architecture", "")).startswith("gemma"):
        # Gemma's scores do not follow its merge order; the order of the pieces does.
        scores: Sequence[float] = [-float(index) for index in range(len(tokens))]
    else:
        scores = _sequence(metadata, "scores", float)
        if len(scores) != len(tokens):
            raise _damaged(f"{len(tokens)} tokens but {len(scores)} scores")
    ids = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, int, int, str, str]] = []
    for index, (piece, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _CONTROL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                order = (-scores[index], -cut, cut - len(piece), ids[left], ids[right])
                merges.append((*order, left, right))
    merges.sort()
    return tokens, [(merge[-2], merge[-1]) for merge in merges]


def _prefix_space(metadata: Mapping[str, object]) -> str:
    architecture = str(metadata.get("general.architecture", ""))
    if not _flag(metadata, "add_space_prefix", not architecture.startswith("gemma")):
        return "never"
    return "always" if architecture == "phi3" else "first"


def _eos_ids(
    metadata: Mapping[str, object],
    vocabulary: Mapping[str, int],
    control: Sequence[str],
    n_tokens: int,
) -> frozenset[int]:
    named = [_id(metadata, f"{end}_token_id", n_tokens) for end in ("eos", "eot", "eom")]
    turn_ends = [vocabulary[token] for token in control if token in _TURN_ENDS]
    return frozenset([*(i for i in named if i is not None), *turn_ends])


def _sequence(
    metadata: Mapping[str, object], key: str, kind: type[T], *, optional: bool = False
) -> Sequence[T]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None and optional:
        return []
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise _damaged(f"tokenizer.ggml.{key} is missing or not a list")
    if not all(issubclass(found, kind) for found in set(map(type, values))):
        raise _damaged(f"tokenizer.ggml.{key} holds something else than {kind.__name__}")
    return values


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if set(map(len, pairs)) != {2} or not all(map(all, pairs)):
        wrong = next(m for m, pair in zip(merges, pairs, strict=True) if [*map(bool, pair)] != _TWO)
        raise _damaged(f"the merge {wrong[:40]!r} is not two tokens")
    return cast("list[tuple[str, str]]", pairs)


def _id(metadata: Mapping[str, object], key: str, n_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < n_tokens:
        raise _damaged(f"tokenizer.ggml.{key} is {value!r}, with {n_tokens} tokens")
    return value


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return default if value is None else bool(value)


def _damaged(reason: str) -> ModelFileError:
    return ModelFileError(
        f"The tokenizer in the GGUF is damaged: {reason}.",
        "Download the file again (llmrun pull), or use another version of the model.",
    )
