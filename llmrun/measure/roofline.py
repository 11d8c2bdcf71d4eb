"""How close a run came to what the machine can do: MBU, MFU and a verdict per phase.

Definitions in docs/measuring.md. The roofline of a phase is the time it would take if it only read
its bytes at the measured bandwidth, or only multiplied at the measured rate, whichever is longer.
A phase is named after that limit if the limit explains at least half of its time; else the time
went elsewhere (calls, synchronisation, kernels far from both limits) and it is overhead-bound.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from llmrun.engine.cache import KvCache
from llmrun.engine.model import Model
from llmrun.measure.ceilings import Ceilings
from llmrun.measure.statistics import Gap, RequestStats

MIN_EXPLAINED = 0.5
"""Share of its time a limit must explain for a phase to be named after it."""


class Bound(StrEnum):
    """What limits a phase."""

    MEMORY = "memory-bound"
    COMPUTE = "compute-bound"
    OVERHEAD = "overhead-bound"


@dataclass(frozen=True)
class Work:
    """What has to be done in some time: bytes to read (weights and K/V apart) and FLOPs."""

    weight_bytes: int
    kv_bytes: int
    flops: int
    time_ns: int

    @property
    def n_bytes(self) -> int:
        """All bytes to read."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class Verdict:
    """One phase against its roofline, per unit (one decode step, one prefill).

    ``mbu`` and ``mfu`` are the shares of the measured ceilings; ``weight_share`` is the part of
    the bytes that are weights. ``lost_ms`` is ``measured_ms`` minus ``roofline_ms``; it is
    negative if the run beat a ceiling, which means that the ceiling was measured too low.
    """

    bound: Bound
    mbu: float
    mfu: float
    weight_share: float
    measured_ms: float
    roofline_ms: float

    @property
    def lost_ms(self) -> float:
        """Time above the roofline."""
        return self.measured_ms - self.roofline_ms


def model_flops(model: Model, computed: int, cached: int, n_rows: int = 1) -> int:
    """FLOPs of running ``computed`` tokens behind ``cached`` ones, with ``n_rows`` rows of logits.

    ``2 P T + 2 vocab hidden R + 4 n_heads head_dim sum(A)`` over the layers, where A is the number
    of positions attended to, summed over the tokens.
    """
    spec = model.spec
    attended = sum(_attended(computed, cached, layer.window) for layer in spec.layers)
    linear = 2 * model.linear_parameters * computed
    head = 2 * spec.vocab * spec.hidden * n_rows
    return linear + head + 4 * spec.heads.n_heads * spec.heads.head_dim * attended


def _attended(computed: int, cached: int, window: int | None) -> int:
    """``sum(min(cached + j, window))`` for j = 1..computed."""
    full = computed if window is None else min(max(window - cached, 0), computed)
    inside = full * cached + full * (full + 1) // 2
    return inside + (computed - full) * (window or 0)


def prefill_work(model: Model, cache: KvCache, request: RequestStats) -> Work:
    """The work of a request's prefill: each chunk reads the weights, and K/V up to its end.

    The head is counted with the weights of each chunk, though only the last one needs it.
    """
    computed, cached = request.computed_tokens, request.cached_tokens
    ends = [min(n + model.max_tokens, computed) for n in range(0, computed, model.max_tokens)]
    return Work(
        weight_bytes=model.weight_bytes_per_token * len(ends),
        kv_bytes=sum(cache.read_bytes(cached + end) for end in ends),
        flops=model_flops(model, computed, cached),
        time_ns=request.parts.prefill_ns,
    )


def decode_work(model: Model, cache: KvCache, gaps: Iterable[Gap]) -> list[Work]:
    """The work of each decode step; steps disturbed by a waiting consumer are left out."""
    weight_bytes = model.weight_bytes_per_token
    return [
        Work(
            weight_bytes=weight_bytes,
            kv_bytes=cache.read_bytes(gap.depth_tokens),
            flops=model_flops(model, 1, gap.depth_tokens - 1),
            time_ns=gap.step_ns,
        )
        for gap in gaps
        if gap.undisturbed
    ]


def step_floor_ns(model: Model, cache: KvCache, ceilings: Ceilings) -> Callable[[int], float]:
    """The least time of a decode step at a depth, if it only read its bytes (for the live line)."""
    ns_per_byte = 1e9 / ceilings.bandwidth_bytes_per_s
    weight_bytes = model.weight_bytes_per_token
    return lambda depth_tokens: (weight_bytes + cache.read_bytes(depth_tokens)) * ns_per_byte


def judge(units: Sequence[Work], ceilings: Ceilings) -> Verdict | None:
    """Compare work with the ceilings; None if there is none, or it took no time."""
    time_s = sum(work.time_ns for work in units) / 1e9
    if not time_s:
        return None
    weight_bytes = sum(work.weight_bytes for work in units)
    n_bytes = sum(work.n_bytes for work in units)
    memory_s = n_bytes / ceilings.bandwidth_bytes_per_s
    compute_s = sum(work.flops for work in units) / ceilings.flops_per_s
    bound = Bound.MEMORY if memory_s >= compute_s else Bound.COMPUTE
    roofline_s = max(memory_s, compute_s)
    if roofline_s < MIN_EXPLAINED * time_s:
        bound = Bound.OVERHEAD
    return Verdict(
        bound=bound,
        mbu=memory_s / time_s,
        mfu=compute_s / time_s,
        weight_share=weight_bytes / n_bytes,
        measured_ms=time_s * 1e3 / len(units),
        roofline_ms=roofline_s * 1e3 / len(units),
    )
