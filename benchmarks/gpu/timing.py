"""The clock of the sections: llmrun's own on a GPU, the host's where there is none."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

Call = Callable[[], object]


class Timer(Protocol):
    """Times calls that write to memory made before."""

    def __call__(self, calls: Sequence[Call], *, graph: bool = True) -> float:
        """Seconds of one of the calls, all of which run in turn; see ``kernels/gpu/timing.py``."""


def on_host(calls: Sequence[Call], *, graph: bool = True) -> float:
    """Each call once, by the host's clock: what a dry run has."""
    start_s = time.perf_counter()
    for call in calls:
        call()
    return max((time.perf_counter() - start_s) / len(calls), 1e-9)
