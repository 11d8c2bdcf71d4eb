"""A reference and its children pushed through their layers side by side, and what differs.

At any moment one layer of one model is bound to a backend (at the end the heads of all), beside
the hidden states of each. The reference computes with plain numbers; a noisy twin of it, whose
states are shaken after every layer, measures how much of a difference means nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

from llmrun.kernels.forms import Form
from llmrun.kernels.ops import Backend
from llmrun.model.decoder import MAX_TOKENS
from llmrun.model.parameters import expected, layer_of
from llmrun.model.spec import DecoderSpec
from llmrun.model.streaming import LayerStream
from llmrun.quant.deviation import StateError, dense, relative_mse
from llmrun.quant.fidelity import Comparison, Fidelity, Predictions, predictions

NOISE = 2.0**-9
"""Relative noise of the twin: half a step of bf16, in which models are usually run."""

SEED = 0

KV_FORM = "f16"
"""Keys and values of reference and children alike, as chat holds them."""

STATISTICS_COST = 64
"""What the statistics of one logit cost, in multiply-adds, for the time left."""

Tensors = Mapping[str, Form]
OnWork = Callable[[int, int], None]
"""Is told the work done and the work in all, in a unit of its own; may raise to end it."""


@dataclass(frozen=True, eq=False)
class Side:
    """A model to push through: ``layer(number)`` and ``outer()`` read parameters by name."""

    name: str
    spec: DecoderSpec
    backend: Backend
    layer: Callable[[int], Tensors]
    outer: Callable[[], Tensors]


@dataclass(frozen=True)
class Windows:
    """What is read and scored: in each of ``sequences``, all of one length C, the positions from
    ``first`` to C - 2, each predicting the token behind it. ``vocab``: ids that count."""

    sequences: tuple[tuple[int, ...], ...]
    first: int
    vocab: int

    @property
    def scored(self) -> int:
        """Positions that are scored."""
        return len(self.sequences) * (len(self.sequences[0]) - 1 - self.first)


@dataclass(frozen=True)
class TensorError:
    """A weight of a child: the kind it is stored as, and its error relative to the reference's."""

    name: str
    kind: str
    relative_mse: float


@dataclass(frozen=True)
class Measured:
    """One child. ``sqnr_db``: of the hidden states behind each layer; ``tensors``: worst first."""

    fidelity: Fidelity
    sqnr_db: tuple[float, ...]
    tensors: tuple[TensorError, ...]


@dataclass(eq=False)
class _Run:
    """A child on its way."""

    side: Side
    stream: LayerStream
    errors: list[StateError] = field(default_factory=list)
    tensors: list[TensorError] = field(default_factory=list)
    comparison: Comparison = field(default_factory=Comparison)

    def measured(self) -> Measured:
        worst = sorted(self.tensors, key=lambda error: (-error.relative_mse, error.name))
        sqnr = tuple(error.sqnr_db for error in self.errors)
        return Measured(self.comparison.finish(), sqnr, tuple(worst))


def run(
    reference: Side, children: Sequence[Side], windows: Windows, on_work: OnWork
) -> tuple[Fidelity, list[Measured]]:
    """Compare each child with the reference; also the reference with its noisy twin (first)."""
    reference = _exact(reference)
    meter = _Meter(reference.spec, windows, 2 + len(children), on_work)
    parent = _stream(reference, windows, meter)
    runs = [_Run(child, _stream(child, windows, meter)) for child in children]
    twin = _layers(reference, parent, runs, meter)
    outer = reference.outer()
    ends = [(parent, outer), (twin, outer), *((one.stream, one.side.outer()) for one in runs)]
    floor = Comparison()
    for sequence, positions, blocks in _aligned(
        [_predicted(stream, tensors, windows) for stream, tensors in ends]
    ):
        ids = windows.sequences[sequence]
        targets = [ids[position + 1] for position in positions]
        ref, shaken, *others = blocks
        floor.add(ref, shaken, targets)
        for one, own in zip(runs, others, strict=True):
            one.comparison.add(ref, own, targets)
        meter.scored(len(positions))
    return floor.finish(), [one.measured() for one in runs]


def _layers(
    reference: Side, parent: LayerStream, runs: Sequence[_Run], meter: "_Meter"
) -> LayerStream:
    outer = reference.outer()
    parent.embed(outer)
    twin = parent.fork()
    for one in runs:
        tensors = one.side.outer()
        one.stream.embed(tensors)
        one.tensors += _differences(outer, tensors)
    del outer
    for number in range(len(reference.spec.layers)):
        plain = reference.layer(number)
        parent.run_layer(number, plain)
        twin.run_layer(number, plain)
        twin.add_noise(NOISE, SEED, number)
        for one in runs:
            tensors = one.side.layer(number)
            one.stream.run_layer(number, tensors)
            one.tensors += _differences(plain, tensors)
            one.errors.append(_state_error(parent, one.stream))
    return twin


def _stream(side: Side, windows: Windows, meter: "_Meter") -> LayerStream:
    return LayerStream(
        side.spec, side.backend, windows.sequences, kv_form=KV_FORM, between=meter.tick
    )


def _exact(side: Side) -> Side:
    """The model with plain numbers for weights, so that its kernels compute in fp32."""

    def plain(tensors: Tensors) -> dict[str, Form]:
        return {name: dense(form) for name, form in tensors.items()}

    return replace(
        side,
        layer=lambda number: plain(side.layer(number)),
        outer=lambda: plain(side.outer()),
    )


def _differences(reference: Tensors, child: Tensors) -> list[TensorError]:
    """Of the matrices that the child does not hold as the reference does."""
    return [
        TensorError(name, form.kind, relative_mse(reference[name], form))
        for name, form in child.items()
        if len(form.shape) == 2 and name in reference
    ]


def _state_error(reference: LayerStream, child: LayerStream) -> StateError:
    error = StateError()
    for ref, own in zip(reference.states(), child.states(), strict=True):
        error.add(ref.values, own.values)
    return error


@dataclass(frozen=True, eq=False)
class _Block:
    """Predictions at some positions of a sequence."""

    sequence: int
    positions: range
    made: Predictions

    def first(self, count: int) -> "_Block":
        return self._part(0, count)

    def behind(self, count: int) -> "_Block":
        return self._part(count, len(self.positions))

    def _part(self, start: int, stop: int) -> "_Block":
        if (start, stop) == (0, len(self.positions)):
            return self
        return replace(self, positions=self.positions[start:stop], made=self.made.rows(start, stop))


def _predicted(stream: LayerStream, outer: Tensors, windows: Windows) -> Iterator[_Block]:
    last = len(windows.sequences[0]) - 1
    for rows in stream.logits(outer, windows.first):
        made = _Block(rows.sequence, rows.positions, predictions(rows.logits, windows.vocab))
        if made.positions[-1] == last:  # no token stands behind it
            made = made.first(len(made.positions) - 1)
        if made.positions:
            yield made


def _aligned(
    streams: Sequence[Iterator[_Block]],
) -> Iterator[tuple[int, range, list[Predictions]]]:
    """Sequence, positions, and each stream's predictions there.

    All go through the same positions, but models with heads of different sizes in blocks of
    different lengths.
    """
    held = [next(stream, None) for stream in streams]
    while blocks := [block for block in held if block is not None]:
        count = min(len(block.positions) for block in blocks)
        yield (
            blocks[0].sequence,
            blocks[0].positions[:count],
            [block.first(count).made for block in blocks],
        )
        held = [
            block.behind(count) if len(block.positions) > count else next(stream, None)
            for block, stream in zip(blocks, streams, strict=True)
        ]


class _Meter:
    """Counts multiply-adds, so that layers and head are compared by what they take."""

    def __init__(self, spec: DecoderSpec, windows: Windows, streams: int, on_work: OnWork) -> None:
        tokens = len(windows.sequences) * len(windows.sequences[0])
        layers = sum(
            prod(parameter.shape)
            for name, parameter in expected(spec).items()
            if layer_of(name) is not None
        )
        chunks = sum(ceil(len(ids) / MAX_TOKENS) for ids in windows.sequences)
        self._per_call = layers * tokens // (chunks * len(spec.layers))
        self._per_position = streams * windows.vocab * (spec.hidden + STATISTICS_COST)
        # Each stream is asked between chunks of every layer, and before: when it looks ids up.
        self._calls = streams * chunks * len(spec.layers)
        self._total = self._calls * self._per_call + windows.scored * self._per_position
        self._done = 0
        self._on_work = on_work

    def tick(self) -> None:
        """Between two chunks of a stream."""
        if self._calls > 0:
            self._calls -= 1
            self._done += self._per_call
        self._on_work(self._done, self._total)

    def scored(self, positions: int) -> None:
        """Positions of all streams."""
        self._done += positions * self._per_position
        self._on_work(min(self._done, self._total), self._total)
