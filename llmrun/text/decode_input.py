"""Bytes of stdin, files and arguments become text that can be encoded again.

One decoder for all three. A byte order mark is honoured and dropped. What is not UTF-8 is replaced
by U+FFFD exactly once, here, and counted, so that the caller can warn once; no surrogate ever
leaves this file.
"""

import codecs
import re
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
_ENCODED_REPLACEMENT = REPLACEMENT.encode()
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_ESCAPED_BYTES = re.compile("[\udc80-\udcff]+")
_LONE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class DecodedText:
    """Clean text and how many replacement marks were put in for what could not be read."""

    text: str
    replaced: int


def decode_bytes(data: bytes) -> DecodedText:
    """UTF-8 to text; UTF-16 only where a byte order mark says so and all of it is valid."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            return DecodedText(data.decode("utf-16"), 0)
        except UnicodeDecodeError:
            pass  # not UTF-16 after all; read on as damaged UTF-8
    return _utf8(data.removeprefix(codecs.BOM_UTF8))


def clean_text(text: str) -> DecodedText:
    """Text from arguments or a line editor: surrogate pairs joined, lone halves replaced.

    Bytes that Python kept as U+DC80..U+DCFF (its way of passing undecodable arguments on) are
    decoded as UTF-8.
    """
    if not _LONE.search(text):
        return DecodedText(text, 0)
    text = _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
    replaced = 0

    def from_bytes(run: re.Match[str]) -> str:
        nonlocal replaced
        decoded = _utf8(run[0].encode("utf-8", "surrogateescape"))
        replaced += decoded.replaced
        return decoded.text

    text = _ESCAPED_BYTES.sub(from_bytes, text)
    text, lone = _LONE.subn(REPLACEMENT, text)
    return DecodedText(text, replaced + lone)


def _utf8(data: bytes) -> DecodedText:
    text = data.decode("utf-8", "replace")
    # U+FFFD may also stand in the input; its three bytes are never part of another character.
    return DecodedText(text, text.count(REPLACEMENT) - data.count(_ENCODED_REPLACEMENT))
