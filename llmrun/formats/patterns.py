"""Regular expressions from a model file, matched in time linear in the name.

A quantized checkpoint says by pattern which modules belong to which scheme. Python's own engine
backtracks and can be made to run for ever, so these patterns are simulated as sets of states
with a memo. Known: literals, ``.``, escapes ``\\d \\w \\s``, classes, groups, ``|``, ``* + ?``,
``^`` and ``$``. Everything else (look-around, counts, back-references) is a ValueError.
"""

import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from llmrun.formats.limits import PATTERN_CHARS

_MEMO = 4_096
_DEPTH = 32
_SHORTHANDS = {
    "d": string.digits,
    "w": string.ascii_letters + string.digits + "_",
    "s": string.whitespace,
}


def compile_pattern(text: str) -> Callable[[str], bool]:
    """Return a test with the meaning of ``re.match(text, name) is not None``."""
    if len(text) > PATTERN_CHARS:
        raise ValueError(f"{len(text)} characters, over {PATTERN_CHARS}")
    parser = _Parser(text)
    start, end = parser.alternation(0)
    if parser.position != len(text):
        raise ValueError(f"unexpected {text[parser.position]!r}")
    edges = parser.edges
    first = _closure(edges, [start], {_FREE, _START})
    memo: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(name: str) -> bool:
        states = first
        for character in name:
            if end in states:
                return True
            key = (states, character)
            following = memo.get(key)
            if following is None:
                if len(memo) >= _MEMO:
                    memo.clear()
                following = memo[key] = _step(edges, states, character)
            states = following
            if not states:
                return False
        last = {_FREE, _END} if name else {_FREE, _START, _END}
        return end in _closure(edges, states, last)

    return matches


@dataclass(frozen=True)
class _Chars:
    """An edge that consumes one character of (or not of) a set."""

    members: frozenset[str]
    inverted: bool = False

    def take(self, character: str) -> bool:
        return (character in self.members) != self.inverted


_FREE, _START, _END = "free", "start", "end"
_Edges = list[list[tuple[_Chars | str, int]]]


def _step(edges: _Edges, states: Iterable[int], character: str) -> frozenset[int]:
    reached = [
        target
        for state in states
        for label, target in edges[state]
        if isinstance(label, _Chars) and label.take(character)
    ]
    return _closure(edges, reached, {_FREE})


def _closure(edges: _Edges, states: Iterable[int], labels: set[str]) -> frozenset[int]:
    """Return all states reached without consuming a character."""
    reached = set(states)
    pending = list(reached)
    while pending:
        for label, target in edges[pending.pop()]:
            if isinstance(label, str) and label in labels and target not in reached:
                reached.add(target)
                pending.append(target)
    return frozenset(reached)


@dataclass
class _Parser:
    """Recursive descent over the pattern; every method returns a fragment (start, end state)."""

    text: str
    position: int = 0
    edges: _Edges = field(default_factory=list)

    def alternation(self, depth: int) -> tuple[int, int]:
        if depth > _DEPTH:
            raise ValueError("nested too deeply")
        start, end = self._state(), self._state()
        while True:
            first, last = self._sequence(depth)
            self.edges[start].append((_FREE, first))
            self.edges[last].append((_FREE, end))
            if not self._accept("|"):
                return start, end

    def _sequence(self, depth: int) -> tuple[int, int]:
        start = end = self._state()
        while self._peek() not in ("", "|", ")"):
            first, last = self._repeated(depth)
            self.edges[end].append((_FREE, first))
            end = last
        return start, end

    def _repeated(self, depth: int) -> tuple[int, int]:
        first, last = self._atom(depth)
        sign = self._peek()
        if sign not in ("*", "+", "?"):
            return first, last
        self.position += 1
        self._accept("?")  # lazy or not makes no difference to whether a name matches
        start, end = self._state(), self._state()
        self.edges[start].append((_FREE, first))
        self.edges[last].append((_FREE, end))
        if sign != "+":
            self.edges[start].append((_FREE, end))
        if sign != "?":
            self.edges[last].append((_FREE, first))
        return start, end

    def _atom(self, depth: int) -> tuple[int, int]:
        character = self._take()
        if character == "(":
            if self._accept("?") and not self._accept(":"):
                raise ValueError("look-around and named groups are not supported")
            fragment = self.alternation(depth + 1)
            if not self._accept(")"):
                raise ValueError("a group is not closed")
            return fragment
        if character in "*+?{})":
            raise ValueError(f"unexpected {character!r}")
        if character in "^$":
            return self._edge(_START if character == "^" else _END)
        if character == ".":
            return self._edge(_Chars(frozenset("\n"), inverted=True))
        if character == "[":
            return self._edge(self._set())
        members = self._escape() if character == "\\" else character
        return self._edge(_Chars(frozenset(members)))

    def _set(self) -> _Chars:
        inverted = self._accept("^")
        members: set[str] = set()
        while True:
            character = self._take()
            if character == "]" and members:
                return _Chars(frozenset(members), inverted)
            found = self._escape() if character == "\\" else character
            if (
                len(found) == 1
                and self._peek() == "-"
                and self.text[self.position + 1 :][:1] != "]"
            ):
                self.position += 1
                top = self._take()
                if top == "\\" or not found <= top or ord(top) > 127:
                    raise ValueError("a character range is not supported")
                found = "".join(map(chr, range(ord(found), ord(top) + 1)))
            members.update(found)

    def _escape(self) -> str:
        character = self._take()
        if character in _SHORTHANDS:
            return _SHORTHANDS[character]
        if character.isalnum():
            raise ValueError(f"the escape \\{character} is not supported")
        return character

    def _edge(self, label: _Chars | str) -> tuple[int, int]:
        start, end = self._state(), self._state()
        self.edges[start].append((label, end))
        return start, end

    def _state(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _take(self) -> str:
        if self.position >= len(self.text):
            raise ValueError("it ends too early")
        self.position += 1
        return self.text[self.position - 1]

    def _accept(self, character: str) -> bool:
        if self._peek() != character:
            return False
        self.position += 1
        return True
