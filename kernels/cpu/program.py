"""Record once, replay per token: the ops of a step as one array of native instructions.

A program is recorded twice, while it runs, and must come out the same byte for byte: an op that
baked in something that changes per token (a position, a length) is found and named. From then on
a step is one native call, or one per layer where somebody may want to interrupt it.
"""

import ctypes
from collections.abc import Callable, Iterator

from llmrun.errors import InternalError
from llmrun.kernels.cpu import abi
from llmrun.kernels.ops import OPS

INSTR_BYTES = ctypes.sizeof(abi.Instr)

Run = Callable[[int, int], None]
"""Runs so many instructions from an address on."""


class Program:
    """Instructions in the order of the ops, cut into segments (layers).

    ``whole`` is None until it can be replayed: then the address of its first instruction and how
    many there are, for a step that nobody interrupts.
    """

    def __init__(self) -> None:
        self.whole: tuple[int, int] | None = None
        self._recorded: list[abi.Instr] = []
        self._held: dict[int, object] = {}
        self._ends: list[int] = []
        self._bytes: bytes | None = None
        self._array: ctypes.Array[abi.Instr] | None = None

    def add(self, instr: abi.Instr) -> None:
        """Append an instruction while recording."""
        self._recorded.append(instr)

    def hold(self, pointed: object) -> None:
        """Keep what an instruction points to, from the first recording on."""
        self._held[id(pointed)] = pointed

    def record(self, emit: Iterator[None], interrupt: Callable[[], bool]) -> bool:
        """Run the ops and keep what they add; False if interrupted (nothing is kept then)."""
        self._recorded, self._ends = [], []
        for _ in emit:
            self._ends.append(len(self._recorded))
            if interrupt():
                return False
        if self._ends[-1:] != [len(self._recorded)]:  # behind the last layer: the head
            self._ends.append(len(self._recorded))
        self._seal()
        return True

    def replay(self, run: Run, interrupt: Callable[[], bool]) -> bool:
        """Run it again; False if interrupted after a segment."""
        assert self.whole is not None
        address, _ = self.whole
        start = 0
        for end in self._ends:
            run(address + start * INSTR_BYTES, end - start)
            start = end
            if interrupt() and end < self._ends[-1]:
                return False
        return True

    def _seal(self) -> None:
        array = (abi.Instr * len(self._recorded))(*self._recorded)
        recorded = bytes(array)
        if self._bytes is None:
            self._bytes = recorded
            return
        if recorded != self._bytes:
            raise InternalError(
                f"op {self._first_difference(recorded)} recorded something that changes per token",
                "please report this; --device cpu with the torch kernels still works",
            )
        self._array = array
        self.whole = (ctypes.addressof(array), len(array))
        self._recorded = []

    def _first_difference(self, recorded: bytes) -> str:
        assert self._bytes is not None
        for number, start in enumerate(range(0, len(recorded), INSTR_BYTES)):
            part = slice(start, start + INSTR_BYTES)
            if recorded[part] != self._bytes[part]:
                return f"{OPS[self._recorded[number].op]} (instruction {number})"
        return "count"
