"""Runs one row: a process for each engine, turn by turn, and what came out."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from common import Spread, spread
from rows import HERE, Contender, Derived, Job, Row
from work import Facts

HOG = "while True: pass"
HOG_START_S = 0.2

TURN_S = 0.2
"""Pause before each sample: OpenMP's threads go on spinning for some milliseconds when their work
is done, and would take the next engine's cores."""


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs in one job, round by round; None if a side has no samples."""

    job: str
    ours: str
    theirs: str
    ratio: Spread | None


@dataclass(frozen=True)
class Gain:
    """What ``Row.derived`` asks for, of one contender."""

    title: str
    contender: str
    value: Spread | None


@dataclass
class Outcome:
    """A row with its samples: ``speeds[job][contender]`` in tokens per second, a round each."""

    row: Row
    facts: dict[str, Facts] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    speeds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    derived: list[Gain] = field(default_factory=list)

    def spread(self, job: str, contender: str) -> Spread | None:
        """Speed of a contender; None without samples."""
        samples = self.speeds[job].get(contender)
        return spread(samples) if samples else None


class Ended(Exception):
    """An engine's process ended before its time; the text says how."""


class Process:
    """An engine at work in its own process."""

    def __init__(self, contender: Contender, python: str, row: Row, threads: int) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see close
        numbers = {"capacity": row.capacity, "sequences": row.sequences, "threads": threads}
        more = [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
        command = [python, str(HERE / contender.script), str(contender.model)]
        self._process = subprocess.Popen(
            [*command, *more, *contender.extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def facts(self) -> Facts:
        """What it says when it is ready. Ended if it does not get there."""
        facts: Facts = json.loads(self._line())
        return facts

    def speed(self, job: Job) -> float:
        """Tokens per second of a job. Ended if the process does not survive it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job.request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Ended(self._how()) from None
        seconds: float = json.loads(self._line())["seconds"]
        return job.tokens / seconds

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Ended(self._how())
        return line

    def _how(self) -> str:
        status = self._process.wait()
        if status < 0:
            return f"crashed with {signal.Signals(-status).name}"
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f"ended with status {status}: {lines[-1] if lines else 'no message'}"


def run(row: Row, peer_python: str, threads: int, rounds: int) -> Outcome:
    """Every contender does every job, in turn, ``rounds`` times after one that does not count."""
    outcome = Outcome(row, speeds={job.name: {} for job in row.jobs})
    with contextlib.ExitStack() as stack:
        engines = {}
        for contender in row.contenders:
            python = sys.executable if contender.is_ours else peer_python
            engine = Process(contender, python, row, threads)
            stack.callback(engine.close)
            try:
                outcome.facts[_label(contender)] = engine.facts()
            except Ended as ended:
                outcome.failures[_label(contender)] = str(ended)
            else:
                engines[_label(contender)] = engine
        for number in range(rounds + 1):
            for job in row.jobs:
                _take_turns(outcome, engines, job, counts=number > 0)
    _compare(outcome)
    return outcome


def _take_turns(outcome: Outcome, engines: dict[str, Process], job: Job, *, counts: bool) -> None:
    time.sleep(job.settle_s)
    for name, engine in list(engines.items()):
        time.sleep(TURN_S)
        try:
            with _hogs(job.hogs):
                speed = engine.speed(job)
        except Ended as ended:
            outcome.failures[name] = str(ended)
            del engines[name]
            continue
        if counts:
            outcome.speeds[job.name].setdefault(name, []).append(speed)


@contextlib.contextmanager
def _hogs(count: int) -> Iterator[None]:
    """So many processes that compute without end meanwhile."""
    hogs = [subprocess.Popen([sys.executable, "-S", "-c", HOG]) for _ in range(count)]
    time.sleep(HOG_START_S if hogs else 0)
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _compare(outcome: Outcome) -> None:
    row = outcome.row
    ours = [_label(contender) for contender in row.contenders if contender.is_ours]
    theirs = [_label(contender) for contender in row.contenders if not contender.is_ours]
    for job in row.jobs:
        speeds = outcome.speeds[job.name]
        outcome.ratios += [
            Ratio(job.name, one, other, _over(speeds.get(one), speeds.get(other)))
            for one in ours
            for other in theirs
        ]
    if row.derived is not None:
        outcome.derived += [_gain(outcome, name, row.derived) for name in [*ours, *theirs]]


def _gain(outcome: Outcome, contender: str, derived: Derived) -> Gain:
    first, second = (outcome.speeds[job.name].get(contender) for job in outcome.row.jobs[:2])
    value = _over(second, first)
    if value is not None:
        share = derived.share
        value = Spread(value.median / share, value.least / share, value.most / share)
    return Gain(derived.title, contender, value)


def _over(one: list[float] | None, other: list[float] | None) -> Spread | None:
    """One over the other, of the rounds that both finished."""
    if not one or not other:
        return None
    return spread([a / b for a, b in zip(one, other, strict=False)])


def _label(contender: Contender) -> str:
    return f"{'llmrun' if contender.is_ours else 'llama.cpp'} {contender.name}"
