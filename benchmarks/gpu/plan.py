"""Which sections there are, and until when each of them may run.

Every section has its seconds. One that needs less leaves the rest to those behind it; one that
needs more may take what those before it left, and never what those behind it need.
"""

from collections.abc import Mapping, Sequence

SECTIONS: Mapping[str, float] = {
    "env": 5,
    "compile": 60,
    "correctness": 60,
    "ceilings": 15,
    "gemv": 70,
    "gap": 15,
    "crossover": 30,
    "attention": 25,
    "e2e": 150,
}
"""Seconds of each section, in the order they run."""

REPORT_S = 5.0
"""Kept for the report."""

START_S = 6.0
"""What starting a worker takes: importing torch, making a CUDA context."""

LEAST_S = 2.0
"""A section that has less than this left is skipped."""


def ends(start_s: float, budget_s: float, sections: Sequence[str]) -> dict[str, float]:
    """The latest end of each section on the clock of ``start_s``; all end within the budget."""
    usable = max(0.0, budget_s - REPORT_S - START_S)
    wanted = sum(SECTIONS[name] for name in sections)
    share = min(1.0, usable / wanted) if wanted else 1.0
    end_s = start_s + budget_s - REPORT_S
    result = {}
    for name in reversed(sections):
        result[name] = end_s
        end_s -= SECTIONS[name] * share
    return {name: result[name] for name in sections}
