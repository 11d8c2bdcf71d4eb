"""Predictions of several models at the same positions, block by block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmrun.model.streaming import Ending, LayerStream
from llmrun.quant.fidelity import Predictions, predictions


@dataclass(frozen=True, eq=False)
class Block:
    """Predictions at some positions of a sequence."""

    sequence: int
    positions: range
    made: Predictions

    def first(self, count: int) -> "Block":
        """The first so many positions."""
        return self._part(0, count)

    def behind(self, count: int) -> "Block":
        """All positions but the first so many."""
        return self._part(count, len(self.positions))

    def _part(self, start: int, stop: int) -> "Block":
        if (start, stop) == (0, len(self.positions)):
            return self
        return replace(self, positions=self.positions[start:stop], made=self.made.rows(start, stop))


def predicted(stream: LayerStream, ending: Ending, positions: range, vocab: int) -> Iterator[Block]:
    """A model's predictions over the first ``vocab`` ids at these positions of each sequence."""
    for rows in stream.logits(ending, positions.start):
        made = Block(rows.sequence, rows.positions, predictions(rows.logits, vocab))
        made = made.first(max(0, min(made.positions.stop, positions.stop) - made.positions.start))
        if made.positions:
            yield made


def aligned(streams: Sequence[Iterator[Block]]) -> Iterator[tuple[int, range, list[Predictions]]]:
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
