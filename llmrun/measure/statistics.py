"""From stamped events to the numbers of docs/measuring.md, without loss: all times stay integers.

Nothing here reads a clock. Percentiles are by nearest rank, so each is a value that was measured;
with too few values there is none (None), never a guess.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmrun.engine.events import Finish, TokenEvent

MIN_VALUES = {95: 20, 99: 100}
"""Fewest values for which a percentile is given; other percentiles need one value."""

MAX_WAIT_SHARE = 0.01
"""Largest share of waiting in a gap, or in a run, that still counts as measured undisturbed."""


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile: the smallest value that at least ``percent`` % do not exceed.

    None if there are too few values ("n too small").
    """
    n = len(values)
    if n < MIN_VALUES.get(percent, 1):
        return None
    rank = -(-percent * n // 100)  # ceil in integers: 0.07 * 100 is above 7 in floats
    return sorted(values)[max(rank, 1) - 1]


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def sd(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None for fewer than two values."""
    if len(values) < 2:
        return None
    middle = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


@dataclass(frozen=True)
class TtftParts:
    """The time to first token, split; the parts sum to it exactly.

    ``handover_ns`` is what passed between tokenizing and the engine's start (a thread starting).
    """

    tokenize_ns: int
    handover_ns: int
    lookup_ns: int
    prefill_ns: int
    sample_ns: int


@dataclass(frozen=True)
class Gap:
    """The time between two consecutive ids: the engine's step and the consumer's wait.

    ``depth_tokens`` is the number of tokens in the cache whose K and V the step read.
    """

    step_ns: int
    wait_ns: int
    depth_tokens: int

    @property
    def itl_ns(self) -> int:
        """Inter-token latency."""
        return self.step_ns + self.wait_ns

    @property
    def undisturbed(self) -> bool:
        """Whether the wait is at most 1 % of the gap."""
        return self.wait_ns <= MAX_WAIT_SHARE * self.itl_ns


@dataclass(frozen=True)
class RequestStats:
    """The measures of one request. ``finish`` is None if it was interrupted or cut off."""

    ttft_ns: int
    parts: TtftParts
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    gaps: tuple[Gap, ...]
    finish: Finish | None

    @property
    def itl_ns(self) -> tuple[int, ...]:
        """All inter-token latencies, in order."""
        return tuple(gap.itl_ns for gap in self.gaps)

    @property
    def decode_ns(self) -> int:
        """From the first id to the last."""
        return sum(gap.itl_ns for gap in self.gaps)

    @property
    def wait_share(self) -> float:
        """Share of the decode time in which the engine waited for its consumer."""
        return share(sum(gap.wait_ns for gap in self.gaps), self.decode_ns) or 0.0

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token, the mean gap; None for fewer than two ids."""
        return share(self.decode_ns, len(self.gaps))

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Decode speed, (n - 1) / (t_n - t_1); None for fewer than two ids."""
        return share(len(self.gaps) * 1e9, self.decode_ns)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prefill speed over the prompt ids really computed."""
        return share(self.computed_tokens * 1e9, self.parts.prefill_ns)

    @property
    def computed_tokens(self) -> int:
        """Prompt ids really computed: those that were not in the cache."""
        return self.prompt_tokens - self.cached_tokens


def share(part: float, whole: float) -> float | None:
    """``part / whole``; None where there is no whole."""
    return part / whole if whole else None


def summarize(
    events: Sequence[TokenEvent], *, t_submit_ns: int, tokenize_ns: int = 0
) -> RequestStats:
    """Measure one request from all its events.

    ``t_submit_ns`` was read just before templating and tokenizing, which took ``tokenize_ns``;
    a prompt given as ids was submitted just before ``generate``. ValueError without events: a
    request that was stopped before its first id has no latencies.
    """
    if not events or events[0].parts is None:
        raise ValueError("a request is measured from its first event on")
    first, parts = events[0], events[0].parts
    gaps = tuple(
        Gap(e.step_ns, e.time_ns - before.time_ns - e.step_ns, e.position)
        for before, e in pairwise(events)
    )
    return RequestStats(
        ttft_ns=first.time_ns - t_submit_ns,
        parts=TtftParts(
            tokenize_ns=tokenize_ns,
            handover_ns=parts.start_ns - t_submit_ns - tokenize_ns,
            lookup_ns=parts.lookup_ns,
            prefill_ns=parts.prefill_ns,
            sample_ns=parts.sample_ns,
        ),
        prompt_tokens=parts.prompt_tokens,
        cached_tokens=parts.cached_tokens,
        generated_tokens=len(events),
        gaps=gaps,
        finish=events[-1].finish,
    )
