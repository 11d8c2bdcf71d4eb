"""Streaming text with one status line below it, without owning the screen.

The status line stands in the row under the text, wherever that is. It is drawn with movements that
need neither the position nor the size of the screen (index, up, save, restore), so a resize, the
bottom row and the scrollback do no harm. The column of the text is followed only to know when text
leaves its row, because the status line has to be wiped before that.
"""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

_MAKE_ROOM = "\x1bD\x1b[A"  # one row down, scrolling if it is the last, and up again
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_ROW_BELOW = "\x1b[B\r\x1b[K"
_WIPE_BELOW = "\x1b[J"
_TAB = 8


class Screen:
    """``write`` sends raw text to the terminal; ``columns`` tells its width now."""

    def __init__(self, write: Callable[[str], None], columns: Callable[[], int]) -> None:
        self._write = write
        self._columns = columns
        self._column = 0
        self._has_status = False

    def text(self, text: str) -> None:
        """Add text. The status line goes if the text leaves its row; draw it again then."""
        width = self._columns()
        laid = _lay(text, self._column, width)
        text = laid.text
        if self._has_status and laid.leaves_row:
            # At the right edge the cursor still stands on the last character: wiping from there
            # would take that one too, so first go to the next row.
            n = _first_visible(text) if self._column >= width else 0
            text = text[:n] + _WIPE_BELOW + text[n:]
            self._has_status = False
        self._column = laid.column
        if text:
            self._write(text)

    @property
    def has_status(self) -> bool:
        """Whether a status line is on the screen."""
        return self._has_status

    def status(self, line: str) -> None:
        """Show ``line`` (no wider than the screen) below the text, in place of what is there.

        At the right edge of a row nothing is drawn: moving the cursor away from there and back
        would make the next character overwrite the last.
        """
        if self._column >= self._columns():
            return
        self._write(f"{_MAKE_ROOM}{_SAVE}{_ROW_BELOW}{line}{_RESTORE}")
        self._has_status = True

    def end(self) -> None:
        """Wipe the status line and leave the cursor at the start of a row of its own."""
        ending = "\n" if self._column else ""
        if self._has_status:
            ending += _WIPE_BELOW
        if ending:
            self._write(ending)
        self._column, self._has_status = 0, False


@dataclass(frozen=True)
class _Laid:
    """Text without tabs, the column it ends in, and whether that is another row."""

    text: str
    column: int
    leaves_row: bool


def _lay(text: str, column: int, width: int) -> _Laid:
    """Follow the cursor. Tabs become spaces: terminals disagree about tabs at the right edge."""
    shown = []
    leaves_row = False
    for given in text:
        for character in " " * (_TAB - column % _TAB) if given == "\t" else given:
            taken = cells(character)
            if character == "\n":
                column, leaves_row = 0, True
            elif column + taken > width:
                column, leaves_row = taken, True
            else:
                column += taken
            shown.append(character)
    return _Laid("".join(shown), column, leaves_row)


def _first_visible(text: str) -> int:
    """Characters up to and including the first that moves the cursor."""
    return next((i for i, c in enumerate(text, 1) if c == "\n" or cells(c)), len(text))


@lru_cache(maxsize=4096)
def cells(character: str) -> int:
    """Columns one character takes on a terminal."""
    if character == "\n" or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def fit(line: str, width: int) -> str:
    """The line, cut to at most ``width`` columns."""
    taken = 0
    for i, character in enumerate(line):
        taken += cells(character)
        if taken > width:
            return line[:i]
    return line
