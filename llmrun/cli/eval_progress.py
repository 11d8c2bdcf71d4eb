"""How far an evaluation is, on stderr: a bar with the time left, or a plain line per quarter."""

import contextlib
import time
from collections.abc import Iterator

from llmrun.cli.eval_lockstep import OnWork
from llmrun.cli.session import Session

STEPS = 1000
"""Of the bar."""


@contextlib.contextmanager
def work_progress(session: Session, label: str) -> Iterator[OnWork]:
    """Yields a function to be told the work done and the work in all."""
    if session.quiet:
        yield lambda done, total: None
    elif session.terminal.draws:
        with _bar(session, label) as told:
            yield told
    else:
        session.say(f"{label} ...")
        yield _quarters(session)


@contextlib.contextmanager
def _bar(session: Session, label: str) -> Iterator[OnWork]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    from llmrun.text.terminal import clean

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True, no_color=not session.terminal.styled),
        transient=True,
    )
    task = bar.add_task(escape(clean(label)), total=STEPS)
    with bar:
        yield lambda done, total: bar.update(task, completed=STEPS * done // max(total, 1))


def _quarters(session: Session) -> OnWork:
    start_s, said = time.monotonic(), 0

    def told(done: int, total: int) -> None:
        nonlocal said
        quarter = 4 * done // max(total, 1)
        if not said < quarter < 4:
            return
        said = quarter
        left_s = (time.monotonic() - start_s) * (total - done) / done
        session.say(f"{25 * quarter} %, about {left_s:,.0f} s left")

    return told
