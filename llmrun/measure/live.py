"""The numbers of the live line, kept up to date event by event.

They are those of ``statistics.summarize`` over the events so far. One event costs a few
microseconds whatever came before, so the meter stays far below 1 % of decode speed.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from llmrun.engine.events import TokenEvent
from llmrun.measure.statistics import Gap, share


@dataclass(frozen=True)
class Reading:
    """What the live line shows. What needs a decode step is None before the second id."""

    ttft_ms: float
    itl_last_ms: float | None
    itl_p50_ms: float | None
    tokens_per_s: float | None
    mbu: float | None
    generated_tokens: int
    context_tokens: int
    context_limit: int


class Meter:
    """Takes the events of one request, gives readings.

    ``step_floor_ns`` (``roofline.step_floor_ns``) gives the least time of a step at a depth; a
    meter without it shows no MBU.
    """

    def __init__(
        self,
        t_submit_ns: int,
        context_limit: int,
        step_floor_ns: Callable[[int], float] | None = None,
    ) -> None:
        self._t_submit_ns = t_submit_ns
        self._context_limit = context_limit
        self._first_ns = 0
        self._last_ns = 0
        self._itl_ns = 0
        self._sorted_itl_ns: list[int] = []
        self._step_floor_ns = step_floor_ns
        self._floor_ns = 0.0
        self._step_ns = 0

    def push(self, event: TokenEvent) -> Reading:
        """Count one event; return the new reading.

        ``context_tokens`` are the tokens in the cache: the new id is not, until it is fed.
        """
        if event.parts is not None:
            self._first_ns = event.time_ns
        else:
            self._itl_ns = event.time_ns - self._last_ns
            insort(self._sorted_itl_ns, self._itl_ns)
            self._count_floor(event)
        self._last_ns = event.time_ns
        n = len(self._sorted_itl_ns)
        elapsed_ns = self._last_ns - self._first_ns
        return Reading(
            ttft_ms=(self._first_ns - self._t_submit_ns) / 1e6,
            itl_last_ms=self._itl_ns / 1e6 if n else None,
            itl_p50_ms=self._sorted_itl_ns[(n - 1) // 2] / 1e6 if n else None,
            tokens_per_s=share(n * 1e9, elapsed_ns),
            mbu=share(self._floor_ns, self._step_ns),
            generated_tokens=n + 1,
            context_tokens=event.position,
            context_limit=self._context_limit,
        )

    def _count_floor(self, event: TokenEvent) -> None:
        gap = Gap(event.step_ns, self._itl_ns - event.step_ns, event.position)
        if self._step_floor_ns is not None and gap.undisturbed:
            self._floor_ns += self._step_floor_ns(gap.depth_tokens)
            self._step_ns += gap.step_ns
