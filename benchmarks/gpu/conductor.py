"""Starts workers, reads what they report, and ends them in time.

The GPU is never touched in this process: a kernel that hangs or kills its process costs one case,
and the report is written whatever happens. After a crash the next worker goes on behind the case
that caused it; a case that overruns its section's end is killed, and the section with it.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from gpu.journal import Journal

GRACE_S = 3.0
"""A section that ends later than this behind its end hangs."""

CRASHES = 8
"""More than that and nothing more is started."""

DIED = "the process died"


@dataclass(frozen=True)
class Setting:
    """``dry`` and ``environment`` of all workers; ``end_s``: nothing runs behind it."""

    dry: bool
    environment: Mapping[str, str]
    end_s: float


def conduct(journal: Journal, ends: Mapping[str, float], setting: Setting) -> str:
    """Run all sections; returns ``complete``, or why not. What they report goes to the journal."""
    crashes = 0
    while pending := [name for name in ends if journal.sections[name].state in _OPEN]:
        if time.monotonic() >= setting.end_s:
            return "the budget is used up"
        if crashes > CRASHES:
            return f"{crashes} workers died"
        overran = _Worker(journal, {name: ends[name] for name in pending}, setting).watch()
        if all(journal.sections[name].state not in _OPEN for name in ends):
            break
        if overran:
            _give_up_section(journal, "it took longer than it may")
        else:
            crashes += 1
            _crashed(journal)
    return "complete"


_OPEN = ("waiting", "running")


def _give_up_section(journal: Journal, why: str) -> None:
    journal.lost("cut", why)
    for section in journal.sections.values():
        if section.state == "running":
            section.state, section.why = "cut", why


def _crashed(journal: Journal) -> None:
    if journal.running is not None:
        journal.lost("crashed", DIED)
        return
    for section in journal.sections.values():
        if section.state == "running" and not _last_failed(section.cases.values()):
            section.state, section.why = "failed", DIED  # or it would die there again
            return
    if not any(section.state == "running" for section in journal.sections.values()):
        journal.close("no worker could be started")


def _last_failed(cases: object) -> bool:
    """Whether a worker left on purpose, behind a case that cost it its context."""
    listed = list(cases)  # type: ignore[call-overload]
    return bool(listed) and listed[-1].state in ("error", "crashed")


class _Worker:
    """One process and the pipe it reports through."""

    def __init__(self, journal: Journal, ends: Mapping[str, float], setting: Setting) -> None:
        self._journal = journal
        self._ends = ends
        self._end_s = setting.end_s
        self._pipe, theirs = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu.worker", str(theirs)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            pass_fds=[theirs],
            env=dict(setting.environment),
            start_new_session=True,
        )
        os.close(theirs)
        orders = {
            "dry": setting.dry,
            "sections": ends,
            "done": journal.done(next(iter(ends))),
            "facts": journal.facts,
        }
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # if it died at once, watching it will find out
            self._process.stdin.write(json.dumps(orders).encode())
            self._process.stdin.close()

    def watch(self) -> bool:
        """Read its reports until it ends; True if it had to be killed for the time it took."""
        held = b""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._pipe, selectors.EVENT_READ)
                while True:
                    left_s = self._limit_s() - time.monotonic()
                    if left_s <= 0:
                        return True
                    if not selector.select(left_s):
                        continue
                    more = os.read(self._pipe, 1 << 16)
                    if not more:
                        return False
                    *lines, held = (held + more).split(b"\n")
                    for line in lines:
                        self._journal.add(json.loads(line))
        finally:
            self._kill()
            os.close(self._pipe)

    def _limit_s(self) -> float:
        for name, end_s in self._ends.items():
            if self._journal.sections[name].state == "running":
                return min(end_s + GRACE_S, self._end_s)
        return self._end_s

    def _kill(self) -> None:
        """End it and those it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
