"""How a tokenizer spells text in its tokens: from token strings back to bytes, then to text.

Read from the decoder part of a tokenizer file. Bytes are turned into text as they complete
characters, each token once, so the text of a stream is the text of the whole by construction.
Invalid bytes become U+FFFD, one per maximal invalid part, and valid characters next to them stay
(the tokenizers library gives up a whole run of byte tokens for one bad byte).
"""

import codecs
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from llmrun.errors import ModelFileError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@cache
def byte_alphabet() -> Mapping[str, int]:
    """The letters that byte-level tokenizers write bytes with: printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


@dataclass(frozen=True)
class Spelling:
    """The steps from a token to its bytes. ``first_mark`` is dropped from the first token;
    ``strip_spaces`` spaces are dropped from the start of the whole text."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    first_mark: str = ""
    strip_spaces: int = 0

    def token_bytes(self, token: str, first: bool) -> bytes:
        """The bytes one token stands for; ``first``: it starts the text."""
        if self.byte_level:
            try:
                return bytes(map(byte_alphabet().__getitem__, token))
            except KeyError:  # an added token, written as it reads
                return token.encode()
        if first and self.first_mark:
            token = token.replace(self.first_mark, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else token.encode()

    def missing_bytes(self, has_token: Callable[[str], bool]) -> frozenset[int]:
        """The bytes that have no token of their own; ``has_token``: the vocabulary's answer.

        All of them where bytes are not spelled at all, but only whole characters.
        """
        if self.byte_level:
            tokens = {byte: letter for letter, byte in byte_alphabet().items()}
        elif self.byte_fallback:
            tokens = {byte: f"<0x{byte:02X}>" for byte in range(256)}
        else:
            return frozenset(range(256))
        return frozenset(byte for byte, token in tokens.items() if not has_token(token))


def read_spelling(decoder: Mapping[str, object] | None) -> Spelling:
    """The spelling that the ``decoder`` section of a tokenizer file describes.

    ModelFileError for steps llmrun does not know.
    """
    steps = _steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = str(steps[0].get("replacement", "▁"))
        prepends = steps[0].get("prepend_scheme", "always") != "never"
        return Spelling(replacements=((mark, " "),), first_mark=mark if prepends else "")
    # The SentencePiece form: Replace, ByteFallback, Fuse, Strip, each optional but in this order.
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    strip = steps[-1] if kinds[-1:] == ["Strip"] else None
    known = all(kind in order for kind in kinds) and kinds == sorted(kinds, key=order.index)
    if not known or "Replace" not in kinds or (strip and not _strips_start(strip, kinds)):
        raise _unknown(decoder)
    return Spelling(
        replacements=tuple(_replacement(step) for step in steps if step["type"] == "Replace"),
        byte_fallback="ByteFallback" in kinds,
        strip_spaces=int(str(strip["start"])) if strip else 0,
    )


class TextStream:
    """Token strings in, text out; holds an unfinished character back, at most three bytes."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._strip = spelling.strip_spaces

    def push(self, token: str) -> str:
        """The text that ``token`` completes."""
        data = self._spelling.token_bytes(token, self._first)
        self._first = False
        return self._stripped(self._characters.decode(data))

    def flush(self) -> str:
        """What is left at the end: a replacement mark for an unfinished character."""
        return self._stripped(self._characters.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(" "):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


def _steps(decoder: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    if decoder is None:
        raise _unknown(decoder)
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise _unknown(decoder)
    return steps


def _strips_start(strip: Mapping[str, object], kinds: list[str]) -> bool:
    return (
        "Fuse" in kinds
        and strip.get("content") == " "
        and strip.get("stop") == 0
        and isinstance(strip.get("start"), int)
    )


def _replacement(step: Mapping[str, object]) -> tuple[str, str]:
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or "String" not in pattern:
        raise _unknown(step)
    return str(pattern["String"]), str(step.get("content", ""))


def _unknown(decoder: object) -> ModelFileError:
    return ModelFileError(
        f"The tokenizer turns ids into text by steps llmrun does not know: {str(decoder)[:200]}",
        "Use another version of the model, or a model of a supported family.",
    )
