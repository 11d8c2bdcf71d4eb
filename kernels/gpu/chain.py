"""A chain of decode steps on the device: the id a step chooses is the next one's input.

Nothing of a step passes through the host before the next is issued. What was chosen is copied to
pinned memory when the device gets there, with an event behind it; the host reads it when the event
is past. A chain works in the memory of one step, which nobody else may set while it is open.

Where all rows take the largest logit, the head finds it; otherwise kernels behind it choose.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from llmrun.kernels.gpu import pick
from llmrun.kernels.gpu.arrays import GpuKvLayer, GpuStep
from llmrun.kernels.gpu.device import Device, Event
from llmrun.kernels.gpu.graphs import Graphs, Launches, Planned, shape_of
from llmrun.kernels.gpu.linear import Best
from llmrun.kernels.gpu.pick import Feed, PickState
from llmrun.kernels.ops import Pick, PickRequest

RING = 8
"""Steps that may be issued and not read."""

Planning = Callable[[Best | None], Planned]
"""Plans a step whose head writes that beside its logits, if it is given."""


class _Memory:
    """What the chains of one step need, made once: graphs hold its addresses."""

    def __init__(self, device: Device, state: PickState, best: Best) -> None:
        self.state = state
        self.best = best
        self.ring = device.on_host(state.result, RING)
        self.events: list[Event] = [device.event() for _ in range(RING)]


class Chains:
    """Makes the chains of a backend."""

    def __init__(self, device: Device, graphs: Graphs) -> None:
        self.device = device
        self.graphs = graphs
        self._memories: WeakKeyDictionary[GpuStep, dict[int, _Memory]] = WeakKeyDictionary()
        self._capturable: WeakKeyDictionary[GpuStep, dict[Hashable, bool]] = WeakKeyDictionary()

    def start(
        self,
        step: GpuStep,
        kv: Sequence[GpuKvLayer],
        key: Hashable,
        planned: Planning,
        logits: torch.Tensor,
        requests: Sequence[PickRequest],
    ) -> "GpuChain | None":
        """A chain as ``Backend.chain`` says, None if a request is not served by kernels.

        ``planned`` gives the launches of a step up to its ``logits`` fp32 [R, V]. None too if the
        host decides something in them: it would wait there, and a step ahead is only work.
        """
        if not (kv and step.small and all(map(pick.served, requests))):
            return None
        capturable = self._capturable.setdefault(step, {})
        if key not in capturable:
            capturable[key] = planned(None).capturable
        if not capturable[key]:
            return None
        memories = self._memories.setdefault(step, {})
        rows = step.bucket
        if rows not in memories:
            state = PickState.empty(rows, logits.shape[1], logits.device)
            best = Best.empty(rows, logits.shape[1], logits.device)
            memories[rows] = _Memory(self.device, state, best)
        memory = memories[rows]
        memory.state.set(requests)
        return GpuChain(self, memory, step, kv, key, planned, logits, requests)


class GpuChain:
    """``kernels.ops.Chain`` on a GPU; made by ``Chains``."""

    def __init__(
        self,
        chains: Chains,
        memory: _Memory,
        step: GpuStep,
        kv: Sequence[GpuKvLayer],
        key: Hashable,
        planned: Planning,
        logits: torch.Tensor,
        requests: Sequence[PickRequest],
    ) -> None:
        self._chains = chains
        self._memory = memory
        self._step = step
        self._kv = kv
        self._key = key
        self._planned: Planning | None = planned
        self._logits = logits
        self._n_rows = len(requests)
        self._filters = pick.filtered(requests)
        vocab = pick.greedy(requests)
        self._best = None if vocab is None else replace(memory.best, vocab=vocab)
        self._issued = 0
        self._read = 0

    @property
    def open(self) -> bool:
        """Until ``close``."""
        return self._planned is not None

    def queue(self) -> None:
        """Issue a step, and the copy of what it chooses."""
        if not self.open or self._issued - self._read == RING:
            raise ValueError("the chain is closed, or too much of it is unread")
        device, memory, step = self._chains.device, self._memory, self._step
        key = ("chain", self._key, shape_of(step), self._ending)
        self._chains.graphs.run(step, self._kv, key, self._launches)
        place = self._issued % RING
        device.copy(memory.state.result, memory.ring[place])
        memory.events[place].record()
        self._issued += 1

    def read(self) -> list[Pick]:
        """Wait for the oldest step that was not read; its picks."""
        if not self.open or self._issued == self._read:
            raise ValueError("the chain is closed, or has nothing to read")
        place = self._read % RING
        self._memory.events[place].wait()
        self._read += 1
        return pick.picks(self._memory.ring[place, : self._n_rows])

    def close(self) -> None:
        """Forget the steps that were not read; they end by themselves."""
        self._planned = None  # which holds the model

    @property
    def _ending(self) -> Hashable:
        """What tells apart the launches that choose."""
        return ("best", self._best.vocab) if self._best is not None else ("scan", self._filters)

    def _launches(self) -> Planned:
        assert self._planned is not None
        plan = self._planned(self._best)
        feed = Feed(self._step.ids, self._step.positions)
        state = self._memory.state
        if self._best is not None:
            choosing = [pick.best_launch(self._best, state, feed)]
        else:
            choosing = pick.launches(self._logits, state, feed, filters=self._filters)
        return Launches([*plan.launches, *choosing], plan.capturable)
