"""Foreign text made harmless for a terminal.

Newline and tab stay. Every other C0 control, DEL, C1 controls, every escape sequence (CSI, OSC,
DCS, SOS, PM, APC, two-byte), carriage returns and bidirectional overrides and isolates are dropped.
The filter keeps its state over chunks, so a sequence cut anywhere is dropped as a whole. Only for
terminals: off a terminal the text goes out unchanged.
"""

import re
from enum import Enum, auto

from llmrun.text.limits import HIDDEN_TERMINAL_CHARACTERS

_BIDI = "\u202a-\u202e\u2066-\u2069"
_HARMFUL = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}]")
_STRING_STARTS = frozenset("]PX^_")  # after ESC: OSC, DCS, SOS, PM, APC
_C1_STRING_STARTS = frozenset("\x9d\x90\x98\x9e\x9f")
_ENDS_STRING = frozenset("\x07\x18\x1a\x9c")  # BEL, CAN, SUB, ST


class _State(Enum):
    TEXT = auto()
    ESCAPE = auto()  # after ESC
    CSI = auto()
    STRING = auto()
    STRING_ESCAPE = auto()  # ESC inside a string: ST if a backslash follows


class TerminalFilter:
    """Streams text; what ``push`` returns holds no control but newline and tab."""

    def __init__(self) -> None:
        self._state = _State.TEXT
        self._hidden = 0

    def push(self, text: str) -> str:
        """Returns the harmless part of ``text``."""
        shown: list[str] = []
        position = 0
        while position < len(text):
            if self._state is _State.TEXT:
                harmful = _HARMFUL.search(text, position)
                if harmful is None:
                    shown.append(text[position:])
                    break
                shown.append(text[position : harmful.start()])
                self._enter(harmful[0])
                position = harmful.end()
            elif self._swallows(text[position]):
                position += 1
                self._hidden += 1
                if self._hidden >= HIDDEN_TERMINAL_CHARACTERS:
                    self._state = _State.TEXT
            else:
                # The character ends the sequence without belonging to it: read it as text.
                self._state = _State.TEXT
        return "".join(shown)

    def flush(self) -> str:
        """The text is over; an unfinished sequence is forgotten. Nothing is ever held back."""
        self._state = _State.TEXT
        return ""

    def _enter(self, control: str) -> None:
        self._hidden = 0
        if control == "\x1b":
            self._state = _State.ESCAPE
        elif control == "\x9b":
            self._state = _State.CSI
        elif control in _C1_STRING_STARTS:
            self._state = _State.STRING

    def _swallows(self, character: str) -> bool:
        """Takes one character inside a sequence; False if it is not part of the sequence."""
        if self._state is _State.STRING:
            return self._in_string(character)
        if self._state is _State.STRING_ESCAPE:
            if character == "\\":
                self._state = _State.TEXT
                return True
            self._state = _State.ESCAPE
        if self._state is _State.ESCAPE:
            return self._in_escape(character)
        if "@" <= character <= "~":  # final byte of a CSI
            self._state = _State.TEXT
            return True
        return " " <= character <= "?"

    def _in_escape(self, character: str) -> bool:
        if character == "[":
            self._state = _State.CSI
        elif character in _STRING_STARTS:
            self._state = _State.STRING
        elif "0" <= character <= "~":
            self._state = _State.TEXT
        else:
            return " " <= character <= "/"  # intermediate bytes, as in ESC ( B
        return True

    def _in_string(self, character: str) -> bool:
        if character == "\n":
            return False
        if character in _ENDS_STRING:
            self._state = _State.TEXT
        elif character == "\x1b":
            self._state = _State.STRING_ESCAPE
        return True


def clean(text: str) -> str:
    """A whole string made harmless: names, error bodies, saved chats."""
    return TerminalFilter().push(text)
