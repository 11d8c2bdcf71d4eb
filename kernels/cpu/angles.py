"""Memory for the rotations of one rope, and how long it lives.

A model may change its rope as its context grows, and every rope has angles of its own. The last few
stay; older ones live on only as long as a recorded program points to them, and no longer.
"""

import ctypes
import weakref

from llmrun.kernels.cpu.memory import Block
from llmrun.kernels.cpu.recent import Recent
from llmrun.kernels.ops import Rope

FLOAT_BYTES = 4
RECENT = 4
"""Ropes whose angles are kept although no program points to them."""


class Angles:
    """Frequencies of a rope, and cosines and sines of all positions below ``capacity``.

    The native op computes a position's when it is first met, and sets its byte at ``ready``.
    """

    def __init__(self, rope: Rope, capacity: int) -> None:
        n = len(rope.inv_freq)
        table = FLOAT_BYTES * 2 * n * capacity
        self._block = Block(table + FLOAT_BYTES * n + capacity)
        self.address = self._block.address
        self.frequencies = self.address + table
        self.ready = self.frequencies + FLOAT_BYTES * n
        (ctypes.c_float * n).from_address(self.frequencies)[:] = list(rope.inv_freq)


class AngleTables:
    """The angles of each rope and capacity, shared by all layers and programs that want them."""

    def __init__(self) -> None:
        self._recent: Recent[tuple[Rope, int], Angles] = Recent(RECENT)
        self._living: weakref.WeakValueDictionary[tuple[Rope, int], Angles] = (
            weakref.WeakValueDictionary()
        )

    def of(self, rope: Rope, capacity: int) -> Angles:
        """The one table that anybody has, or a new one."""
        key = (rope, capacity)
        found = self._living.get(key) or Angles(rope, capacity)
        self._living[key] = self._recent[key] = found
        return found
