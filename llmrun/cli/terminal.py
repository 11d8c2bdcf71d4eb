"""The three standard streams as llmrun sees them: which are terminals, what may be drawn there.

Answers go to stdout as UTF-8 bytes whatever the locale; all else goes to stderr. Nothing is drawn
on a stream that is not a terminal, nor with TERM=dumb; NO_COLOR turns styles off.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, TextIO

from llmrun.cli.settings import Settings
from llmrun.errors import ClosedPipeError

DIM = "\x1b[2m"
PLAIN = "\x1b[0m"
_AS_BEFORE = "\x1b[0m\x1b[?25h\x1b[?2004l"
"""Plain text, visible cursor, no bracketed paste."""

_DEFAULT_COLUMNS = 80


class Terminal:
    """Where a command writes. Made once, in ``app``."""

    def __init__(self, settings: Settings, stdout: TextIO, stderr: TextIO) -> None:
        self._settings = settings
        self._stdout = stdout
        self._stderr = stderr
        self.stdout_is_terminal = stdout.isatty()
        self.stderr_is_terminal = stderr.isatty()
        self.stdin_is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._modes = _line_modes() if self.stdin_is_terminal else None
        self._touched = False

    @property
    def draws(self) -> bool:
        """Whether cursor movements may be used on stderr."""
        return self.stderr_is_terminal and self._settings.term != "dumb"

    @property
    def is_live(self) -> bool:
        """Whether text and a status line can share the screen: both streams are the terminal."""
        return self.draws and self.stdout_is_terminal

    @property
    def styled(self) -> bool:
        """Whether dim and bold may be used on stderr."""
        return self.draws and not self._settings.no_color

    def columns(self) -> int:
        """Width now: COLUMNS, else what the terminal says."""
        if self._settings.columns:
            return self._settings.columns
        for stream in (self._stderr, self._stdout):
            with contextlib.suppress(OSError, ValueError):
                return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS
        return _DEFAULT_COLUMNS

    def write(self, text: str) -> None:
        """Part of the answer, to stdout, at once. ClosedPipeError if nobody reads it any more."""
        try:
            self._stdout.flush()
            binary: BinaryIO = self._stdout.buffer
            binary.write(text.encode("utf-8", "replace"))
            binary.flush()
        except BrokenPipeError as err:
            raise ClosedPipeError("The reader of standard output went away.") from err

    def say(self, text: str, *, dim: bool = False) -> None:
        """A line for the person, to stderr; whatever names it holds cannot drive a terminal."""
        if self.stderr_is_terminal:
            from llmrun.text.terminal import clean

            text = clean(text)
        self._stderr.write((self.dim(text) if dim else text) + "\n")
        self._stderr.flush()

    def draw(self, text: str) -> None:
        """Raw output to stderr, for progress; only where ``draws``."""
        self._touched = True
        self._stderr.write(text)
        self._stderr.flush()

    def lend(self) -> None:
        """Another program part (the line editor) takes the terminal; ``restore`` undoes it."""
        self._touched = True

    def dim(self, text: str) -> str:
        """Dimmed where styles are allowed."""
        return f"{DIM}{text}{PLAIN}" if self.styled else text

    @contextlib.contextmanager
    def silent_keys(self) -> Iterator[None]:
        """What is typed meanwhile is not echoed into the answer; it waits for the next prompt."""
        if self._modes is None or not _in_foreground():
            yield
            return
        import termios

        self._touched = True

        quiet = list(self._modes)
        quiet[3] &= ~(termios.ECHO | termios.ICANON)  # Ctrl-D waits too; Ctrl-C still comes
        self._set_modes(quiet)
        try:
            yield
        finally:
            self._set_modes(self._modes)

    def restore(self) -> None:
        """Leave the terminal as it was found; may be called at any time, from a signal too."""
        if not self._touched:
            return
        if self._modes is not None:
            self._set_modes(self._modes)
        for stream, is_terminal in (
            (self._stderr, self.stderr_is_terminal),
            (self._stdout, self.stdout_is_terminal),
        ):
            if is_terminal and self._settings.term != "dumb":
                with contextlib.suppress(OSError, ValueError):
                    os.write(stream.fileno(), _AS_BEFORE.encode())
                return

    def _set_modes(self, modes: list[Any]) -> None:
        import termios

        # The terminal may be gone by now: then there is nothing to restore.
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, modes)


def use_utf8(*streams: TextIO) -> None:
    """Write UTF-8 whatever the locale says; what cannot be encoded becomes a question mark."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _line_modes() -> list[Any] | None:
    """The terminal's settings as found; None where there is no such thing (Windows)."""
    try:
        import termios
    except ModuleNotFoundError:
        return None
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):
        return None


def _in_foreground() -> bool:
    """A background job that changes the terminal's modes would be stopped by the system."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
