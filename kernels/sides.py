"""What lies on one of two sides (weights, caches, activations), and the way of a step between."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from llmrun.kernels.ops import Array, KvLayer, Span, Step, Weight


class Side(Enum):
    """One of the two."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, eq=False)
class PlacedWeight:
    """A weight of one side."""

    side: Side
    own: Weight

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.own.shape

    @property
    def nbytes(self) -> int:
        """Bytes it takes there."""
        return self.own.nbytes

    @property
    def kind(self) -> str:
        """Short name of its storage form."""
        return self.own.kind


@dataclass(frozen=True, eq=False)
class PlacedKvLayer:
    """Keys and values of a layer, on its side. ``routes``: of steps with a cache that begins with
    this layer."""

    side: Side
    own: KvLayer
    routes: dict[object, "Route"] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes reserved there."""
        return self.own.nbytes


class Twin:
    """Activations of one shape on either side; ``side`` is where they were written last.

    A side's memory is taken when it is first used there.
    """

    def __init__(self, make: Callable[[Side], Array]) -> None:
        self._make = make
        self._arrays: dict[Side, Array] = {}
        self.side: Side | None = None

    def on(self, side: Side) -> Array:
        """Its memory on a side."""
        if side not in self._arrays:
            self._arrays[side] = self._make(side)
        return self._arrays[side]


@dataclass(frozen=True, eq=False)
class Both:
    """A norm weight or bias, the same on either side."""

    arrays: Mapping[Side, Array]

    def on(self, side: Side) -> Array:
        """That of a side."""
        return self.arrays[side]


class TwinStep:
    """The same step for both."""

    def __init__(self, steps: dict[Side, Step]) -> None:
        self._steps = steps
        self.n_tokens = 0
        self.n_rows = 0

    def set(self, token_ids: Sequence[int], spans: Sequence[Span], rows: Sequence[int]) -> None:
        """Describe the next call; see ``kernels/ops.py``."""
        self.n_tokens, self.n_rows = len(token_ids), len(rows)
        for step in self._steps.values():
            step.set(token_ids, spans, rows)

    def on(self, side: Side) -> Step:
        """That of a side."""
        return self._steps[side]


@dataclass(frozen=True, eq=False)
class Crossing:
    """Activations that go to another side before what follows."""

    array: Twin
    source: Side
    target: Side


@dataclass(eq=False)
class Stretch:
    """Ops of one side between two crossings. ``calls``: None stands for the end of a layer.

    ``kv``: the caches of the layers in it, as that side knows them.
    """

    side: Side
    crossings: list[Crossing] = field(default_factory=list)
    calls: list[Callable[[], None] | None] = field(default_factory=list)
    kv: list[KvLayer] = field(default_factory=list)

    def emit(self) -> Iterator[None]:
        """Issue the ops; yields after each layer."""
        for call in self.calls:
            if call is None:
                yield
            else:
                call()


@dataclass(frozen=True, eq=False)
class Route:
    """All ops of a step, cut where they change sides; ``left``: where activations lie after it."""

    stretches: tuple[Stretch, ...]
    left: tuple[tuple[Twin, Side], ...]


class Recording:
    """Notes ops in the order they come and cuts them where the side changes."""

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []
        self._left: dict[Twin, Side] = {}

    def add(
        self, side: Side, crossings: list[Crossing], touched: Sequence[Twin], call: partial[None]
    ) -> None:
        """Note an op of a side that these activations must cross to before."""
        if not self._stretches or self._stretches[-1].side is not side or crossings:
            self._stretches.append(Stretch(side, crossings))
        self._stretches[-1].calls.append(call)
        self._left |= dict.fromkeys(touched, side)

    def end_layer(self, layer: PlacedKvLayer) -> None:
        """What comes now belongs to the next layer."""
        stretch = self._stretches[-1]
        stretch.calls.append(None)
        stretch.kv.append(layer.own)

    def route(self) -> Route:
        """What was noted."""
        return Route(tuple(self._stretches), tuple(self._left.items()))
