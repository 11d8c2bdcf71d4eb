"""How a section runs its cases: announced, timed, and none that the time is too short for."""

import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu.bench import Bench
from gpu.journal import GOOD, WRONG, Values

Emit = Callable[[Mapping[str, Any]], None]

BROKEN = 3
"""Exit status of a worker whose CUDA context is lost."""


class WrongError(Exception):
    """A kernel computed something else than the reference."""


@dataclass(frozen=True)
class Case:
    """One case: ``work`` gives its values or raises; ``warm`` does what compiles its kernels.

    ``needs_s``: it is skipped if less time is left.
    """

    name: str
    work: Callable[[], Values]
    warm: Callable[[], object] | None = None
    needs_s: float = 0.5


class Run:
    """One section in one worker."""

    def __init__(
        self, section: str, bench: Bench, emit: Emit, end_s: float, done: set[str]
    ) -> None:
        self.bench = bench
        self._section = section
        self._emit = emit
        self._end_s = end_s
        self._done = done

    def left_s(self) -> float:
        """Seconds until this section has to end."""
        return self._end_s - time.monotonic()

    def fact(self, name: str, value: object) -> None:
        """Tell later sections, in later workers too."""
        self.bench.facts[name] = value
        self._emit({"at": "fact", "name": name, "value": value})

    def case(self, case: Case) -> str | None:
        """Run one case and report it; its state, None if it ran before."""
        if case.name in self._done:
            return None
        if self.left_s() < (0 if self.bench.dry else case.needs_s):
            return self._report(case, "skipped", 0.0, {}, "no time left")
        self._emit({"at": "case", "section": self._section, "case": case.name})
        start_s = time.monotonic()
        state, values, why = _outcome(case)
        took_s = time.monotonic() - start_s
        self._report(case, state, took_s, values, why)
        if state not in (GOOD, WRONG) and not self.bench.alive():
            os._exit(BROKEN)  # an illegal access: nothing works any more in this process
        return state

    def _report(
        self, case: Case, state: str, took_s: float, values: Values, why: str | None
    ) -> str:
        self._emit(
            {
                "at": "result",
                "section": self._section,
                "case": case.name,
                "state": state,
                "seconds": round(took_s, 3),
                "values": values,
                "why": why,
            }
        )
        return state


def _outcome(case: Case) -> tuple[str, Values, str | None]:
    try:
        return GOOD, case.work(), None
    except WrongError as error:
        return WRONG, {}, str(error)
    except Exception as error:  # whatever it is, the other cases still count
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "site-packages" not in frame.filename]
        place = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno}"
        text = " ".join(str(error).split())[:300]
        return "error", {}, f"{type(error).__name__} in {place}: {text}"
