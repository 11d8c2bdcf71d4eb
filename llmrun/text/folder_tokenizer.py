"""What the small files beside tokenizer.json say: BOS, EOS and further added tokens.

Plain data from tokenizer_config.json and special_tokens_map.json; both may be absent.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.text import limits

_MARKER = re.compile(r"[<\[{|]\S*[>\]}|]")
# Gemma has HTML tags as ordinary added tokens; a person's HTML should be read as in training.
_HTML = re.compile(
    r"</?(?:table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup"
    r"|code|pre|p|a|img|br|hr|ul|ol|li|div|span)/?>"
)


@dataclass(frozen=True)
class AddedText:
    """A token that tokenizer_config.json adds to the vocabulary."""

    id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@dataclass(frozen=True)
class TokenizerFacts:
    """``add_bos`` is None where the files do not say."""

    bos: str | None
    eos: str | None
    add_bos: bool | None
    added: tuple[AddedText, ...]


def is_marker(text: str) -> bool:
    """Whether an added token that the files do not call special is one all the same.

    Models keep ``<tool_call>`` or ``<think>`` unflagged, so that they show in answers; a person's
    words must not become them. Runs of white space, words and HTML tags are plain vocabulary.
    """
    return bool(_MARKER.fullmatch(text)) and not _HTML.fullmatch(text)


def read_facts(folder: Path) -> TokenizerFacts:
    """Reads the two files of ``folder``. ModelFileError if one is damaged."""
    config = read_tokenizer_config(folder)
    names = read_json_object(folder / "special_tokens_map.json")
    flag = config.get("add_bos_token")
    return TokenizerFacts(
        bos=token_string(config.get("bos_token")) or token_string(names.get("bos_token")),
        eos=token_string(config.get("eos_token")) or token_string(names.get("eos_token")),
        add_bos=flag if isinstance(flag, bool) else None,
        added=_added(config.get("added_tokens_decoder")),
    )


def read_tokenizer_config(folder: Path) -> Mapping[str, object]:
    """tokenizer_config.json of ``folder``, empty if there is none."""
    return read_json_object(folder / "tokenizer_config.json")


def token_string(value: object) -> str | None:
    """A token named in a config: a string, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_limited(path: Path, limit: int) -> bytes:
    """The bytes of a file of at most ``limit`` bytes; ModelFileError past that."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError as error:
        raise ModelFileError(
            f"The model folder has no {path.name}.",
            "Use a model folder that holds tokenizer.json, or download it again (llmrun pull).",
        ) from error
    except OSError as error:
        raise ModelFileError(f"Cannot read {path.name}: {error.strerror}.") from error
    if len(data) > limit:
        raise ModelFileError(f"{path.name} is larger than {limit} bytes, which llmrun refuses.")
    return data


def read_json_object(path: Path) -> Mapping[str, object]:
    """The JSON object in a small file, empty if there is none. ModelFileError if it is damaged."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_limited(path, limits.TOKENIZER_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name} does not hold a JSON object.")
    return value


def _added(entries: object) -> tuple[AddedText, ...]:
    if not isinstance(entries, dict):
        return ()
    tokens = []
    for key, entry in entries.items():
        text = token_string(entry)
        if not text or not key.isdecimal():
            raise ModelFileError("added_tokens_decoder in tokenizer_config.json is damaged.")
        flags = {name: entry.get(name) is True for name in ("special", "lstrip", "rstrip")}
        normalized = entry.get("normalized") is True
        tokens.append(AddedText(int(key), text, normalized=normalized, **flags))
    return tuple(sorted(tokens, key=lambda token: token.id))
