"""The plan of a decode step: its ops in order, as launches that hand prepared inputs to each other.

A linear reads inputs that somebody prepared (``arrays.Prepared``). Whoever writes the hidden state
knows its values but not which norm follows; the plan does, since it has the whole step before it
launches any of it. So the producer multiplies the next norm's gamma in, and no launch is spent on a
norm. Where that cannot be (a LayerNorm, a state that nobody has just written) the plan adds one
``prepare`` launch. Pure bookkeeping: no tensor is looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llmrun.kernels.gpu.arrays import Fold, GpuArray
from llmrun.kernels.ops import Norm

Launch = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Read:
    """The activations an op's linears read, ``rows`` of them, and the norm before them."""

    array: GpuArray
    norm: Norm | None
    rows: int


@dataclass(frozen=True, eq=False)
class Call:
    """One op of a decode step.

    ``launch`` is given what to prepare of ``writes``: whether, and with which fold. ``prepares``:
    activations that it always prepares as they are, for a linear without a norm. ``capturable``:
    no decision is taken on the host while it runs. ``folds``: it can prepare what it writes.
    """

    launch: Callable[[bool, Fold | None], None]
    reads: Read | None = None
    writes: GpuArray | None = None
    prepares: GpuArray | None = None
    capturable: bool = True
    folds: bool = True


@dataclass(frozen=True, eq=False)
class Plan:
    """Launches in order; ``capturable`` if all of them are."""

    launches: tuple[Launch, ...]
    capturable: bool

    def run(self) -> None:
        """Launch everything."""
        for launch in self.launches:
            launch()


def foldable(norm: Norm | None) -> bool:
    """Whether a producer can do a norm's part: its factor commutes with the linear."""
    return norm is None or not (norm.centered or norm.beta is not None)


def plan(calls: list[Call], prepare: Callable[[Read], None]) -> Plan:
    """Order the launches of a step. ``prepare`` makes the inputs of a linear in a launch of its
    own."""
    launches: list[Launch] = []
    ready: dict[int, Norm | None] = {}
    for number, call in enumerate(calls):
        if call.reads is not None and not _is_ready(ready, call.reads):
            launches.append(_bound(prepare, call.reads))
            ready[id(call.reads.array)] = call.reads.norm
        following: Read | None = None
        if call.writes is not None:
            following = _next_read(calls[number + 1 :], call.writes)
            ready.pop(id(call.writes), None)
        if following is not None and call.folds and foldable(following.norm):
            ready[id(following.array)] = following.norm
            launches.append(_folding(call, following.norm))
        else:
            launches.append(_plain(call))
        if call.prepares is not None:
            ready[id(call.prepares)] = None
    return Plan(tuple(launches), all(call.capturable for call in calls))


def _is_ready(ready: dict[int, Norm | None], read: Read) -> bool:
    key = id(read.array)
    return key in ready and same_norm(ready[key], read.norm)


def same_norm(one: Norm | None, other: Norm | None) -> bool:
    """Whether two norms are the same: each layer binds its own objects around shared gammas."""
    if one is None or other is None:
        return one is other
    return (one.gamma is other.gamma and one.beta is other.beta) and (
        (one.eps, one.offset, one.centered) == (other.eps, other.offset, other.centered)
    )


def _next_read(calls: list[Call], array: GpuArray) -> Read | None:
    """The first read of an array before it is written again."""
    for call in calls:
        if call.reads is not None and call.reads.array is array:
            return call.reads
        if call.writes is array:
            return None
    return None


def _bound(prepare: Callable[[Read], None], read: Read) -> Launch:
    return lambda: prepare(read)


def _folding(call: Call, norm: Norm | None) -> Launch:
    fold = None if norm is None else Fold(norm.gamma, norm.offset)
    return lambda: call.launch(True, fold)


def _plain(call: Call) -> Launch:
    return lambda: call.launch(False, None)
