"""Downloads and other long work as a person sees them, on stderr.

On a terminal: a bar, gone when it is done. Elsewhere: one plain line when a transfer starts and one
when it ends. Quiet: nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from llmrun.cli.session import Session
from llmrun.cli.terminal import Terminal
from llmrun.cli.units import size
from llmrun.store.progress import Progress, SilentProgress

_CLEAR_LINE = "\r\x1b[K"


def for_session(session: Session) -> Progress:
    """What suits stderr."""
    if session.quiet:
        return SilentProgress()
    return BarProgress(session.terminal) if session.terminal.draws else LineProgress(session)


class LineProgress:
    """Two lines per transfer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._label = ""
        self._done_bytes = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        """Say what begins."""
        self._label, self._done_bytes = label, 0
        total = f" ({size(total_bytes)})" if total_bytes else ""
        self._session.say(f"{label}{total} ...")

    def advance(self, n_bytes: int) -> None:
        """Count."""
        self._done_bytes += n_bytes

    def finish(self) -> None:
        """Say how much came."""
        self._session.say(f"{self._label}: {size(self._done_bytes)}")


class BarProgress:
    """A bar of rich's with size, speed and time left."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bar: Any = None
        self._task: Any = None

    def start(self, label: str, total_bytes: int | None) -> None:
        """Draw the bar."""
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        from llmrun.text.terminal import clean

        self._terminal.draw(_CLEAR_LINE)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
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
