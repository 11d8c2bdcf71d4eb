"""KL by layer: how far a child's next-token distributions are, read off behind each layer.

Final norm and head are applied to the hidden states of every layer as if it were the last (the
"logit lens"). As that costs a head per layer and model, only the last scored positions of each
window are read, and those of at most 64 windows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmrun.kernels.host import DType, HostArray
from llmrun.model.streaming import Ending, LayerStream
from llmrun.quant.fidelity import divergences, predictions

ROWS, ROWS_OF_WINDOW = 64, 16
"""Positions that are read at most, in all and of one window."""


@dataclass(frozen=True)
class Sample:
    """What is read: ``positions`` in each of ``sequences``."""

    sequences: tuple[int, ...]
    positions: range

    @property
    def rows(self) -> int:
        """Positions in all."""
        return len(self.sequences) * len(self.positions)


@dataclass(frozen=True, eq=False)
class Read:
    """A model on its way, and its end."""

    stream: LayerStream
    ending: Ending


def sample(windows: int, scored: range) -> Sample:
    """The last of the ``scored`` positions of each of so many windows; of too many windows some,
    evenly spread."""
    count = min(windows, ROWS)
    each = min(ROWS_OF_WINDOW, ROWS // count)
    return Sample(tuple(i * windows // count for i in range(count)), scored[-each:])


def kl_behind_layer(
    reference: Read,
    children: Sequence[Read],
    what: Sample,
    vocab: int,
    on_rows: Callable[[int], None],
) -> list[float]:
    """Mean KL(reference || child) of each child in nats, over the first ``vocab`` ids.

    nan if nowhere both are finite. ``on_rows`` is told how many rows of logits were computed.
    """
    states = [_picked(one.stream, what) for one in (reference, *children)]
    at_once = min(one.stream.rows_at_once for one in (reference, *children))
    found: list[list[float]] = [[] for _ in children]
    for start in range(0, what.rows, at_once):
        part = range(start, min(start + at_once, what.rows))

        def read(one: Read, h: HostArray, part: range = part) -> HostArray:
            logits = one.stream.read(one.ending, _rows(h, part))
            on_rows(len(part))
            return logits

        ref = predictions(read(reference, states[0]), vocab)
        for kls, one, h in zip(found, children, states[1:], strict=True):
            kls += divergences(ref, predictions(read(one, h), vocab))
    return [math.fsum(kls) / len(kls) if kls else math.nan for kls in found]


def _picked(stream: LayerStream, what: Sample) -> HostArray:
    """The sample's hidden states F32 [rows, D]."""
    parts = []
    for states in stream.states():
        if states.sequence not in what.sequences:
            continue
        here = range(states.position, states.position + states.values.shape[0])
        start, stop = max(here.start, what.positions.start), min(here.stop, what.positions.stop)
        if start < stop:
            part = range(start - here.start, stop - here.start)
            parts.append(bytes(_rows(states.values, part).data))
    data = memoryview(bytearray().join(parts))
    return HostArray(DType.F32, (what.rows, stream.spec.hidden), data)


def _rows(array: HostArray, part: range) -> HostArray:
    width = array.nbytes // array.shape[0]
    data = array.data[part.start * width : part.stop * width]
    return HostArray(array.dtype, (len(part), *array.shape[1:]), data)
