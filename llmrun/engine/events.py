"""What the engine says per generated id; every consumer (terminal, statistics, JSON) reads this.

Stamps come from one monotonic clock in nanoseconds, taken in the engine before the yield
(glossary in docs/measuring.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

Clock = Callable[[], int]
"""A monotonic clock in nanoseconds, normally ``time.monotonic_ns``."""


class Phase(StrEnum):
    """Which machine made this id."""

    PREFILL = "prefill"
    DECODE = "decode"


class Finish(StrEnum):
    """Why generation ended: on the last event, and the return value of ``generate``.

    ``INTERRUPTED`` is a return value only: an interrupt comes between events.
    """

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class PrefillParts:
    """Where the time to first token went inside the engine; on the first event only.

    ``start_ns`` is the stamp at which ``generate`` was entered; tokenizing before it belongs to
    the caller. ``start_ns + lookup_ns + prefill_ns + sample_ns`` is the event's ``time_ns``.
    """

    start_ns: int
    lookup_ns: int
    prefill_ns: int
    sample_ns: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class TokenEvent:
    """One generated id.

    ``time_ns``: the id is known on the host. ``step_ns``: from the moment the engine had control
    again after yielding the previous id (first id: from entry) to ``time_ns``; the rest of the
    gap to the previous event is the consumer's wait. ``position`` is the id's place in the
    sequence, counted from 0: so many tokens stood in the cache when it was chosen. ``logprob``
    and ``top`` are natural logarithms under the plain softmax.
    """

    token_id: int
    time_ns: int
    step_ns: int
    phase: Phase
    logprob: float
    position: int
    finish: Finish | None = None
    parts: PrefillParts | None = None
    top: tuple[tuple[int, float], ...] = ()
