"""Downloads and other long work as a person sees them, on stderr.

On a terminal: a bar, gone when it is done. Elsewhere: one plain line when a transfer starts and one
when it ends. Quiet: nothing.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from llmrun.cli.session import Session
from llmrun.cli.terminal import Terminal
from llmrun.cli.units import size
from llmrun.store.progress import Progress, SilentProgress

QUIET_S = 10.0
"""A log is told how far long work is after so many seconds without a line."""

_CLEAR_LINE = "\r\x1b[K"


def for_session(session: Session) -> Progress:
    """What suits stderr."""
    if session.quiet:
        return SilentProgress()
    return BarProgress(session.terminal) if session.terminal.draws else LineProgress(session)


class LineProgress:
    """Two lines per transfer; one more every ``QUIET_S`` of a long one."""

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._label = ""
        self._total: int | None = None
        self._unit = ""
        self._done = 0
        self._said_s = 0.0

    def start(self, label: str, total_bytes: int | None, unit: str = "bytes") -> None:
        """Say what begins."""
        self._label, self._total, self._unit, self._done = label, total_bytes, unit, 0
        self._said_s = self._clock()
        total = f" ({self._amount(total_bytes)})" if total_bytes else ""
        self._session.say(f"{label}{total} ...")

    def advance(self, n_bytes: int) -> None:
        """Count."""
        self._done += n_bytes
        if self._total and self._clock() - self._said_s >= QUIET_S:
            self._said_s = self._clock()
            self._session.say(f"{self._label}: {100 * self._done // self._total} %")

    def finish(self) -> None:
        """Say how much came."""
        self._session.say(f"{self._label}: {self._amount(self._done)}")

    def _amount(self, count: int) -> str:
        return size(count) if self._unit == "bytes" else f"{count:,} {self._unit}"


class BarProgress:
    """A bar of rich's with size, speed and time left."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bar: Any = None
        self._task: Any = None

    def start(self, label: str, total_bytes: int | None, unit: str = "bytes") -> None:
        """Draw the bar."""
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        from llmrun.text.terminal import clean

        counts: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
        if unit != "bytes":
            counts = (MofNCompleteColumn(), TextColumn(escape(unit)))
        self._terminal.draw(_CLEAR_LINE)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *counts,
            TimeRemainingColumn(),
            console=Console(stderr=True, no_color=not self._terminal.styled),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(escape(clean(label)), total=total_bytes)

    def advance(self, n_bytes: int) -> None:
        """Move it."""
        self._bar.advance(self._task, n_bytes)

    def finish(self) -> None:
        """Take it away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextlib.contextmanager
def activity(session: Session, text: str) -> Iterator[None]:
    """Show what is being done while it takes time; on a terminal only, gone afterwards."""
    shown = session.terminal.draws and not session.quiet
    if shown:
        from llmrun.text.terminal import clean

        session.terminal.draw(_CLEAR_LINE + session.terminal.dim(clean(text)))
    try:
        yield
    finally:
        if shown:
            session.terminal.draw(_CLEAR_LINE)


def say_meanwhile(session: Session, text: str) -> None:
    """A line on stderr in place of what ``activity`` shows there."""
    if session.terminal.draws and not session.quiet:
        session.terminal.draw(_CLEAR_LINE)
    session.say(text)
