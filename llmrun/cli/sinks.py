"""The ways an answer is shown: plain bytes, JSON lines, nothing yet, or live on a terminal."""

import time
from collections.abc import Callable

from llmrun.cli.json_text import json_text
from llmrun.cli.options import Sanitize
from llmrun.cli.prompting import Prompt
from llmrun.cli.screen import Screen, fit
from llmrun.cli.summary import live_line, prefill_line
from llmrun.cli.terminal import Terminal
from llmrun.engine.events import TokenEvent
from llmrun.engine.phases import Progress
from llmrun.measure.live import Meter
from llmrun.text.terminal import TerminalFilter

REDRAW_NS = 100_000_000
"""The status line is drawn at most this often: ten times a second."""

MIN_COLUMNS = 20
"""Narrower terminals get no status line."""


def sanitizes(sanitize: Sanitize, terminal: Terminal) -> bool:
    """Whether what goes to stdout must not be able to drive a terminal."""
    if sanitize is Sanitize.AUTO:
        return terminal.stdout_is_terminal
    return sanitize is Sanitize.ALWAYS


def text_filter(sanitize: Sanitize, terminal: Terminal) -> Callable[[str], str]:
    """What text goes through before stdout."""
    return TerminalFilter().push if sanitizes(sanitize, terminal) else _unchanged


class PlainSink:
    """The answer to stdout as it comes; a newline at its end only if there is none.

    ``shows_prefill``: its progress on stderr, gone before the first text.
    """

    def __init__(
        self, terminal: Terminal, clean: Callable[[str], str], shows_prefill: bool = False
    ) -> None:
        self._terminal = terminal
        self._clean = clean
        self._last = "\n"
        self._screen = Screen(terminal.draw, terminal.columns)
        self.on_prefill: Progress | None = (
            PrefillLine(terminal, self._screen).show if shows_prefill else None
        )

    def token(self, event: TokenEvent, text: str) -> None:
        """Write at once."""
        self._screen.end()
        self._write(text)

    def tail(self, text: str) -> None:
        """Write the rest."""
        self._write(text)

    def close(self) -> None:
        """End the last line."""
        self._screen.end()
        if self._last != "\n":
            self._terminal.write("\n")

    def _write(self, text: str) -> None:
        text = self._clean(text)
        if text:
            self._terminal.write(text)
            self._last = text[-1]


class SilentSink:
    """Shows nothing: ``--json`` prints the answer when it is whole."""

    on_prefill: Progress | None = None

    def token(self, event: TokenEvent, text: str) -> None:
        """Nothing."""

    def tail(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class JsonLinesSink:
    """One JSON object a line for each token event; times in milliseconds since submission.

    Why it ended and the measures follow in a last line, from whoever has the whole answer.
    """

    on_prefill: Progress | None = None

    def __init__(self, terminal: Terminal, prompt: Prompt, *, for_terminal: bool) -> None:
        self._terminal = terminal
        self._t_submit_ns = prompt.t_submit_ns
        self._for_terminal = for_terminal

    def token(self, event: TokenEvent, text: str) -> None:
        """Write one line."""
        self._write(
            {
                "token_id": event.token_id,
                "text": text,
                "time_ms": (event.time_ns - self._t_submit_ns) / 1e6,
                "step_ms": event.step_ns / 1e6,
                "phase": event.phase.value,
                "logprob": event.logprob,
                "position": event.position,
            }
        )

    def tail(self, text: str) -> None:
        """A line without a token for text that was held back."""
        if text:
            self._write({"token_id": None, "text": text})

    def close(self) -> None:
        """Nothing more."""

    def _write(self, line: dict[str, object]) -> None:
        self._terminal.write(json_text(line, for_terminal=self._for_terminal))


class LiveSink:
    """Text with a status line below it, for a person at a terminal."""

    def __init__(self, terminal: Terminal, clean: Callable[[str], str], meter: Meter) -> None:
        self._terminal = terminal
        self._clean = clean
        self._meter = meter
        self._screen = Screen(terminal.write, terminal.columns)
        self._prefill = PrefillLine(terminal, self._screen)
        self._drawn_ns = 0
        self._line = ""
        self.on_prefill: Progress | None = self._prefill.show

    def token(self, event: TokenEvent, text: str) -> None:
        """Show the text now; the numbers at most ten times a second."""
        reading = self._meter.push(event)
        self._screen.text(self._clean(text))
        now = time.monotonic_ns()
        if now - self._drawn_ns >= REDRAW_NS:
            self._drawn_ns = now
            self._line = live_line(reading)
            self._draw()
        elif not self._screen.has_status:
            self._draw()

    def tail(self, text: str) -> None:
        """Show the rest."""
        self._screen.text(self._clean(text))

    def close(self) -> None:
        """Take the status line away."""
        self._screen.end()

    def _draw(self) -> None:
        columns = self._terminal.columns()
        if columns >= MIN_COLUMNS:
            self._screen.status(self._terminal.dim(fit(self._line, columns - 1)))


class PrefillLine:
    """The progress of a prefill as a status line; runs in the engine's thread."""

    def __init__(self, terminal: Terminal, screen: Screen) -> None:
        self._terminal = terminal
        self._screen = screen
        self._start_ns = 0

    def show(self, done: int, total: int) -> None:
        """Draw it; a prefill tells this once per chunk, seldom enough to show each."""
        now = time.monotonic_ns()
        if not done:
            self._start_ns = now
        columns = self._terminal.columns()
        if columns >= MIN_COLUMNS:
            line = prefill_line(done, total, (now - self._start_ns) / 1e9)
            self._screen.status(self._terminal.dim(fit(line, columns - 1)))


def _unchanged(text: str) -> str:
    return text
