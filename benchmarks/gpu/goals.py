"""What is promised of one H200, and what a run says about it.

Milliseconds, at batch 1 and a context of at most 1k tokens. ``goal``: what the design calculates
from bytes, bandwidth and launches; ``must``: what misses the point if it is not reached.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpu.journal import Journal

MEASURED_ON = "H200"


@dataclass(frozen=True)
class Goal:
    """One number, smaller is better. ``path``: names down into the case's values."""

    name: str
    section: str
    case: str
    path: tuple[str, ...]
    goal: float
    must: float


def _per_token(model: str, scheme: str, goal: float, must: float) -> Goal:
    case = f"{model} {scheme}"
    return Goal(f"{case}: ms per token", "e2e", case, ("itl_p50_ms",), goal, must)


def _first(model: str, scheme: str, prompt: int, goal: float, must: float) -> Goal:
    case = f"{model} {scheme}"
    name = f"{case}: ms to the first token of {prompt}"
    return Goal(name, "e2e", case, ("first_ms", str(prompt)), goal, must)


GOALS = (
    _per_token("8B", "bf16", 4.0, 4.6),
    _per_token("8B", "int8", 2.2, 2.7),
    _per_token("8B", "int4", 1.45, 1.9),
    _per_token("8B", "nf4", 1.9, 3.0),
    _per_token("1B", "bf16", 0.82, 1.0),
    _per_token("1B", "int4", 0.43, 0.60),
    _per_token("0.6B", "bf16", 0.70, 1.0),
    _per_token("0.6B", "int4", 0.52, 0.80),
    _first("8B", "bf16", 1024, 28, 40),
    _first("8B", "int4", 1024, 33, 40),
    _first("8B", "bf16", 8192, 220, 300),
    _first("8B", "int4", 8192, 225, 300),
    _first("1B", "bf16", 1024, 6, 12),
    _first("0.6B", "bf16", 1024, 5, 12),
    Goal("us between empty kernels of a graph", "gap", "empty", ("us",), 2.5, 4.0),
)


@dataclass(frozen=True)
class Verdict:
    """A goal and what was measured: ``goal``, ``must`` or ``missed``; None: not measured."""

    goal: Goal
    value: float | None
    met: str | None


def verdicts(journal: Journal) -> Iterator[Verdict]:
    """All goals, in order."""
    for goal in GOALS:
        value: Any = None
        if goal.section in journal.sections:
            first, *rest = goal.path
            value = journal.value(goal.section, goal.case, first)
            for name in rest:
                value = None if value is None else value.get(name)
        yield Verdict(goal, value, None if value is None else _met(goal, value))


def _met(goal: Goal, value: float) -> str:
    if value <= goal.goal:
        return "goal"
    return "must" if value <= goal.must else "missed"
