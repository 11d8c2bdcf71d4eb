"""The tokenizer section of a GGUF as plain data: vocabulary, merges, split rules, special tokens.

Two kinds are read: ``gpt2`` (byte-level BPE, split rules by the name in ``tokenizer.ggml.pre``) and
``llama`` (SentencePiece BPE; its merges are recovered from the pieces and their scores). Any other
kind or split name is refused by name, since a near guess would quietly lower a model's quality.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import TypeVar

from llmrun.errors import ModelFileError
from llmrun.text.splits import SPLITS, Split

T = TypeVar("T")

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_TWO = [True, True]

# Added tokens that end a turn. Files of one model family differ in which of them they name as end
# of sequence; the others would run on after the answer.
_TURN_ENDS = frozenset(
    [
        "<eos>",
        "<EOT>",
        "<|EOT|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_sentence|>",
        "<|endofturn|>",
        "[|endofturn|]",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<\uff5cend▁of▁sentence\uff5c>",
    ]
)
# Ends an answer only as a control token; in Gemma's vocabulary it is an HTML tag.
_TURN_END_OR_TAG = "</s>"
# GLM 4 ends a turn by opening the next one.
_GLM_TURN_ENDS = frozenset(["<|user|>", "<|observation|>"])
_GLM_SPLITS = frozenset(["chatglm-bpe", "glm4"])
# In the format of gpt-oss this ends a part of an answer (its reasoning), not the answer.
_HARMONY_PART_END, _HARMONY_END = "<|end|>", "<|return|>"

# The first pieces of Llama 2's vocabulary after its specials and bytes, by id. Its tokenizer.json
# puts a space mark before every span; those of Mistral, which look the same in a GGUF, before the
# first word only.
_LLAMA2_PIECES = {259: "▁▁", 260: "▁t", 261: "er", 262: "in"}

# Phi 3's and Phi 4 mini's markers take the white space behind them; these do not.
_PHI_NOT_STRIPPING = frozenset(["<|endoftext|>", "<|endofprompt|>"])
_PHI_SPLITS = frozenset(["default", "gpt-4o"])


@dataclass(frozen=True)
class GgufVocabulary:
    """All a BPE tokenizer needs. ``split`` is None for SentencePiece, whose text is not cut.

    ``prefix_space``: ``first`` (a space mark before the text), ``always`` (before every span) or
    ``never``; SentencePiece only. ``control`` tokens are hidden in answers, ``user_defined`` not.
    ``strip_after``: tokens of either sort that take the white space behind them.
    ``eos_id``: the end of sequence the file names; ``eos_ids``: all ids that end an answer.
    """

    vocabulary: dict[str, int]
    merges: list[tuple[str, str]]
    split: Split | None
    prefix_space: str
    control: tuple[str, ...]
    user_defined: tuple[str, ...]
    strip_after: frozenset[str]
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
        split = _split(metadata.get("tokenizer.ggml.pre"))
        prefix_space, default_bos = "never", split.add_bos
        merges = _pairs(_sequence(metadata, "merges", str))
    elif kind == "llama":
        split, default_bos = None, True
        tokens, merges = _sentencepiece(metadata, tokens, types)
        prefix_space = _prefix_space(metadata, tokens)
    else:
        raise ModelFileError(
            f"The GGUF holds a tokenizer of the kind {_shown(kind)}; "
            "llmrun reads 'gpt2' and 'llama'.",
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
        strip_after=_strip_after(metadata, [*control, *user_defined]),
        unknown=None if unknown_id is None else tokens[unknown_id],
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=_eos_ids(metadata, vocabulary, control, user_defined),
        add_bos=_flag(metadata, "add_bos_token", default_bos),
    )


def _split(name: object) -> Split:
    if name is None:
        raise ModelFileError(
            "The GGUF does not say by which rule its tokenizer cuts text; "
            "files of before May 2024 lack that.",
            "Use a newer GGUF of the model, or its safetensors version.",
        )
    if not isinstance(name, str) or name not in SPLITS:
        raise ModelFileError(
            f"The GGUF's tokenizer cuts text by the rule {_shown(name)}, "
            "which llmrun does not know.",
            "Use the model's safetensors version (a folder with tokenizer.json).",
        )
    return SPLITS[name]


def _sentencepiece(
    metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]
) -> tuple[Sequence[str], list[tuple[str, str]]]:
    """Pieces as SentencePiece writes them, and the merges they imply, best first."""
    # Runs of spaces are stored as spaces in some files, though pieces write a space as a mark.
    tokens = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
    scores = _sequence(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise _damaged(f"{len(tokens)} tokens but {len(scores)} scores")
    return tokens, _recovered_merges(tokens, types, scores)


def _recovered_merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third: best score first, of one score long left first.

    User-defined pieces come before all others; files give them a low score, which means nothing.
    Control tokens and bytes are not made of pieces.
    """
    scores = [
        0.0 if kind == _USER_DEFINED else score for kind, score in zip(types, scores, strict=True)
    ]
    shared = {score for score, count in Counter(scores).items() if count > 1}
    known = set(tokens)
    cuts = [range(length - 1, 0, -1) for length in range(max(map(len, tokens)) + 1)]
    joined = [index for index, kind in enumerate(types) if kind not in (_CONTROL, _BYTE)]
    joined.sort(key=scores.__getitem__, reverse=True)
    merges: list[tuple[str, str]] = []
    groups = groupby(joined, lambda index: scores[index] if scores[index] in shared else None)
    for score, group in groups:
        found = [  # the right half is looked up first since most cuts fail there
            (left, right)
            for piece in map(tokens.__getitem__, group)
            for cut in cuts[len(piece)]
            if (right := piece[cut:]) in known and (left := piece[:cut]) in known
        ]
        if score is not None:
            found.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        merges += found
    return merges


def _prefix_space(metadata: Mapping[str, object], tokens: Sequence[str]) -> str:
    architecture = str(metadata.get("general.architecture", ""))
    if not _flag(metadata, "add_space_prefix", not architecture.startswith("gemma")):
        return "never"
    is_llama2 = len(tokens) > max(_LLAMA2_PIECES) and all(
        tokens[index] == piece for index, piece in _LLAMA2_PIECES.items()
    )
    return "always" if architecture == "phi3" or is_llama2 else "first"


def _strip_after(metadata: Mapping[str, object], tokens: Sequence[str]) -> frozenset[str]:
    split = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("general.architecture") != "phi3" or split not in _PHI_SPLITS:
        return frozenset()
    return frozenset(token for token in tokens if token.startswith("<|")) - _PHI_NOT_STRIPPING


def _eos_ids(
    metadata: Mapping[str, object],
    vocabulary: Mapping[str, int],
    control: Sequence[str],
    user_defined: Sequence[str],
) -> frozenset[int]:
    ends = _TURN_ENDS
    if str(metadata.get("tokenizer.ggml.pre")) in _GLM_SPLITS:
        ends |= _GLM_TURN_ENDS
    if _HARMONY_END in control:
        ends -= {_HARMONY_PART_END}
    n_tokens = max(vocabulary.values()) + 1
    named = [_id(metadata, f"{end}_token_id", n_tokens) for end in ("eos", "eot", "eom")]
    turn_ends = [vocabulary[token] for token in (*control, *user_defined) if token in ends]
    turn_ends += [vocabulary[token] for token in control if token == _TURN_END_OR_TAG]
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
    one_space = set(map(str.count, merges, repeat(" "))) == {1}
    tokens = " ".join(merges).split(" ")  # at once: much faster than one by one
    if not one_space or not all(tokens):
        wrong = next(m for m in merges if [*map(bool, m.split(" "))] != _TWO)
        raise _damaged(f"the merge {wrong[:40]!r} is not two tokens")
    return list(zip(tokens[::2], tokens[1::2], strict=True))


def _id(metadata: Mapping[str, object], key: str, n_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < n_tokens:
        raise _damaged(f"tokenizer.ggml.{key} is {value!r}, with {n_tokens} tokens")
    return value


def _shown(value: object) -> str:
    """A value of the file as it may go to a terminal: escaped, and not endless."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return default if value is None else bool(value)


def _damaged(reason: str) -> ModelFileError:
    return ModelFileError(
        f"The tokenizer in the GGUF is damaged: {reason}.",
        "Download the file again (llmrun pull), or use another version of the model.",
    )
