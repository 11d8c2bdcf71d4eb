"""Decode steps that are launched again and again, as graphs: one call instead of hundreds.

A step with a new key runs launch by launch, which compiles and loads its kernels: that is its
warm-up, and it is a real step. The second time it is captured, from then on replayed. A graph holds
addresses, not tensors: it is forgotten with the step or the cache whose memory it works on, so
it keeps nothing alive. Keys must name all that decides which launches a step has, with which
arguments: the ops (``key`` of ``run_layers``) and its buckets (``shape_of``).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from llmrun.kernels.gpu.arrays import GpuKvLayer, GpuStep
from llmrun.kernels.gpu.device import Device, Launch


class Planned(Protocol):
    """Launches in order, and whether a graph may hold them (``plan.Plan``)."""

    @property
    def launches(self) -> Sequence[Launch]:
        """What is launched."""

    @property
    def capturable(self) -> bool:
        """Whether nothing in them is decided on the host."""


@dataclass(frozen=True)
class Launches:
    """A ``Planned`` of given launches."""

    launches: Sequence[Launch]
    capturable: bool = True


@dataclass(frozen=True)
class Shape:
    """Buckets of a decode step: rows of tokens, rows of logits."""

    rows: int
    logits: int


def shape_of(step: GpuStep) -> Shape:
    """The buckets a step falls into; what is launched may depend on them, on nothing finer."""
    logits = step.rows_bucket if step.n_rows else 0
    return Shape(step.bucket, logits)


Replays = dict[Hashable, Launch | None]
"""By key: what replays it; None: it ran once."""


class Graphs:
    """The captured steps of one device.

    ``eager``: every step runs launch by launch, for whoever wants to see its launches. A device
    that cannot capture is always run like this.
    """

    def __init__(self, device: Device, *, eager: bool = False) -> None:
        self._device = device
        self._eager = eager or not device.captures
        self._known: WeakKeyDictionary[GpuStep, WeakKeyDictionary[object, Replays]]
        self._known = WeakKeyDictionary()

    def run(
        self,
        step: GpuStep,
        kv: Sequence[GpuKvLayer],
        key: Hashable,
        planned: Callable[[], Planned],
    ) -> None:
        """Run the launches of ``planned`` for a step, or replay those of the same key.

        Whatever ``planned`` returns is not kept. An exception of a launch passes, and the key stays
        as new as it was.
        """
        if self._eager:
            self._device.warm_up(planned().launches)
            return
        cache = kv[0] if kv else step
        replays = self._known.setdefault(step, WeakKeyDictionary()).setdefault(cache, {})
        replay = replays.get(key)
        if replay is None:
            plan = planned()
            if key not in replays or not plan.capturable:
                self._device.warm_up(plan.launches)
                replays[key] = None
                return
            replay = replays[key] = self._device.capture(plan.launches)
        replay()
