"""The control strings of a tokenizer: where they stand in a text, and how to defuse them.

A special string in template text becomes its id; the same string in a person's words must not. So
``defuse`` puts a noncharacter behind the first character of each one in the words before the
template is rendered, and ``split`` leaves such strings alone and takes the noncharacter out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from llmrun.text.decode_input import REPLACEMENT

BREAK = "\ufdd0"
# White space as the tokenizers library counts it; Python's own strip takes U+001C to U+001F too.
_WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9_]*>")


@dataclass(frozen=True)
class Special:
    """One control token. ``hidden``: its text is left out of answers (``<think>`` is not hidden).

    ``lstrip``/``rstrip``: the token takes the white space on that side with it.
    """

    id: int
    hidden: bool = True
    lstrip: bool = False
    rstrip: bool = False


class Specials:
    """Finds control strings, longest first, in time linear in the text."""

    def __init__(self, tokens: Mapping[str, Special]) -> None:
        self.tokens = tokens
        self._lengths = sorted({len(token) for token in tokens}, reverse=True)
        heads = "".join(re.escape(head) for head in sorted({token[0] for token in tokens}))
        self._head = re.compile(f"[{heads}]") if heads else None

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Position and string of every special string in ``text``, overlapping ones too.

        Where several start at one place, the longest.
        """
        if self._head is None:
            return
        for head in self._head.finditer(text):
            start = head.start()
            if text.startswith(BREAK, start + 1):
                continue
            for length in self._lengths:
                token = text[start : start + length]
                if token in self.tokens:
                    yield start, token
                    break

    def split(self, text: str) -> Iterator[int | str]:
        """The ids of the special strings in ``text`` and the plain spans between them, in order."""
        position = 0
        for start, token in self.find(text):
            if start < position:
                continue
            special = self.tokens[token]
            span = text[position:start]
            if special.lstrip:
                span = span.rstrip(_WHITE)
            if span:
                yield span.replace(BREAK, "")
            yield special.id
            position = start + len(token)
            if special.rstrip:
                position = len(text) - len(text[position:].lstrip(_WHITE))
        if position < len(text):
            yield text[position:].replace(BREAK, "")

    def defuse(self, text: str, *, own_words: bool = False) -> str:
        """``text`` with every special string broken, also one that only starts at its end.

        ``own_words``: text that the model wrote before; visible tags such as ``</think>`` stay
        whole there, because templates look for them to drop old reasoning.
        """
        text = text.replace(BREAK, REPLACEMENT)
        places = {
            start
            for start, token in self.find(text)
            if not (own_words and not self.tokens[token].hidden and _TAG.fullmatch(token))
        }
        places.update(self._unfinished(text))
        return _insert(text, (place + 1 for place in sorted(places)))

    def _unfinished(self, text: str) -> Iterator[int]:
        """Starts of special strings that the text after this one could complete."""
        end = len(text.rstrip())
        for length in range(1, min(self._lengths[0], end + 1) if self._lengths else 0):
            if text[end - length : end] in self._beginnings:
                yield end - length

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(token[:length] for token in self.tokens for length in range(1, len(token)))


def _insert(text: str, places: Iterable[int]) -> str:
    pieces, position = [], 0
    for place in places:
        pieces.append(text[position:place])
        position = place
    pieces.append(text[position:])
    return BREAK.join(pieces)
