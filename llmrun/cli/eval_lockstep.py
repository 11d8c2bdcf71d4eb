"""A reference and its children pushed through their layers side by side, and what differs.

At any moment one layer of one model is bound to a backend, beside the hidden states of each; at
the end, for KL by layer from the start, the heads of all. The reference computes with plain
numbers; a noisy twin of it, whose states are shaken after every layer, measures how much of a
difference means nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from llmrun.cli.eval_blocks import aligned, predicted
from llmrun.cli.eval_lens import Read, Sample, kl_behind_layer, sample
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import Backend
from llmrun.model.decoder import MAX_TOKENS
from llmrun.model.parameters import expected, layer_of
from llmrun.model.spec import DecoderSpec
from llmrun.model.streaming import Ending, LayerStream
from llmrun.quant.deviation import StateError, dense, relative_mse
from llmrun.quant.fidelity import Comparison, Fidelity

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
    def positions(self) -> range:
        """Those of a sequence that are scored."""
        return range(self.first, len(self.sequences[0]) - 1)

    @property
    def scored(self) -> int:
        """Positions that are scored, in all."""
        return len(self.sequences) * len(self.positions)


@dataclass(frozen=True)
class TensorError:
    """A weight of a child: the kind it is stored as, and its error relative to the reference's."""

    name: str
    kind: str
    relative_mse: float


@dataclass(frozen=True)
class Measured:
    """One child. ``sqnr_db``: of the hidden states behind each layer; ``tensors``: worst first.

    ``kl_by_layer``: mean KL of what final norm and head read off behind each layer; nan where
    nothing is finite, empty if it was not asked for.
    """

    fidelity: Fidelity
    sqnr_db: tuple[float, ...]
    tensors: tuple[TensorError, ...]
    kl_by_layer: tuple[float, ...] = ()


class _Run:
    """A model on its way."""

    def __init__(self, side: Side, windows: Windows, meter: "_Meter") -> None:
        self.side = side
        self.stream = LayerStream(
            side.spec, side.backend, windows.sequences, kv_form=KV_FORM, between=meter.tick
        )

    @cached_property
    def ending(self) -> Ending:
        """Its head, in memory from the first use on."""
        return self.stream.ending(self.side.outer())

    @property
    def read(self) -> Read:
        """To be read off between two layers."""
        return Read(self.stream, self.ending)


class _Child(_Run):
    """A child on its way, and what was found so far."""

    def __init__(self, side: Side, windows: Windows, meter: "_Meter") -> None:
        super().__init__(side, windows, meter)
        self.errors: list[StateError] = []
        self.tensors: list[TensorError] = []
        self.kls: list[float] = []
        self.comparison = Comparison()

    def measured(self) -> Measured:
        worst = sorted(self.tensors, key=lambda error: (-error.relative_mse, error.name))
        sqnr = tuple(error.sqnr_db for error in self.errors)
        return Measured(self.comparison.finish(), sqnr, tuple(worst), tuple(self.kls))


def run(
    reference: Side,
    children: Sequence[Side],
    windows: Windows,
    on_work: OnWork,
    *,
    by_layer: bool = False,
) -> tuple[Fidelity, list[Measured]]:
    """Compare each child with the reference; also the reference with its noisy twin (first).

    ``by_layer``: KL by layer too, for which all heads stay in memory meanwhile.
    """
    reference = _exact(reference)
    lens = sample(len(windows.sequences), windows.positions) if by_layer else None
    meter = _Meter(reference.spec, windows, len(children), lens, on_work)
    parent = _Run(reference, windows, meter)
    runs = [_Child(child, windows, meter) for child in children]
    twin = _embed(parent, runs)
    for number in range(len(reference.spec.layers)):
        _layer(number, parent, twin, runs)
        if lens is not None:
            reads = [one.read for one in runs]
            kls = kl_behind_layer(parent.read, reads, lens, windows.vocab, meter.read)
            for one, kl in zip(runs, kls, strict=True):
                one.kls.append(kl)
    ends = [(parent.stream, parent.ending), (twin, parent.ending)]
    ends += [(one.stream, one.ending) for one in runs]
    floor = Comparison()
    for sequence, positions, blocks in aligned(
        [predicted(stream, ending, windows.positions, windows.vocab) for stream, ending in ends]
    ):
        ids = windows.sequences[sequence]
        targets = [ids[position + 1] for position in positions]
        ref, shaken, *others = blocks
        floor.add(ref, shaken, targets)
        for one, own in zip(runs, others, strict=True):
            one.comparison.add(ref, own, targets)
        meter.read(len(positions) * len(ends))
    return floor.finish(), [one.measured() for one in runs]


def _embed(parent: _Run, runs: Sequence[_Child]) -> LayerStream:
    """Look all ids up; the states of the twin."""
    outer = parent.side.outer()
    parent.stream.embed(outer)
    for one in runs:
        tensors = one.side.outer()
        one.stream.embed(tensors)
        one.tensors += _differences(outer, tensors)
    return parent.stream.fork()


def _layer(number: int, parent: _Run, twin: LayerStream, runs: Sequence[_Child]) -> None:
    plain = parent.side.layer(number)
    parent.stream.run_layer(number, plain)
    twin.run_layer(number, plain)
    twin.add_noise(NOISE, SEED, number)
    for one in runs:
        tensors = one.side.layer(number)
        one.stream.run_layer(number, tensors)
        one.tensors += _differences(plain, tensors)
        one.errors.append(_state_error(parent.stream, one.stream))


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


class _Meter:
    """Counts multiply-adds, so that layers and head are compared by what they take."""

    def __init__(
        self,
        spec: DecoderSpec,
        windows: Windows,
        children: int,
        lens: Sample | None,
        on_work: OnWork,
    ) -> None:
        streams = 2 + children
        tokens = len(windows.sequences) * len(windows.sequences[0])
        layers = sum(
            prod(parameter.shape)
            for name, parameter in expected(spec).items()
            if layer_of(name) is not None
        )
        chunks = sum(ceil(len(ids) / MAX_TOKENS) for ids in windows.sequences)
        self._per_call = layers * tokens // (chunks * len(spec.layers))
        self._per_row = windows.vocab * (spec.hidden + STATISTICS_COST)
        rows = windows.scored * streams
        if lens is not None:
            rows += lens.rows * len(spec.layers) * (1 + children)
        # Each stream is asked between chunks of every layer, and before: when it looks ids up.
        self._calls = streams * chunks * len(spec.layers)
        self._total = self._calls * self._per_call + rows * self._per_row
        self._done = 0
        self._on_work = on_work

    def tick(self) -> None:
        """Between two chunks of a stream."""
        if self._calls > 0:
            self._calls -= 1
            self._done += self._per_call
        self._on_work(self._done, self._total)

    def read(self, rows: int) -> None:
        """Logits of positions, each stream's counted."""
        self._done += rows * self._per_row
        self._on_work(min(self._done, self._total), self._total)
