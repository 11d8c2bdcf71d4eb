"""Activation arrays, steps and cache layers of the CPU backend."""

import ctypes
import math
from array import array
from collections.abc import Sequence
from ctypes import c_int32

from llmrun.kernels.cpu import abi
from llmrun.kernels.cpu.memory import Block
from llmrun.kernels.cpu.program import Program
from llmrun.kernels.cpu.recent import Recent
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import Heads, Span

FLOAT_BYTES = 4
SPAN_INTS = ctypes.sizeof(abi.Span) // 4
PROGRAMS = 4
"""Recorded programs of a cache: a model needs two, and two more where its rope has changed."""

KV_TYPES = {"f16": (abi.F16, 2), "f32": (abi.F32, 4)}  # of ops.KV_FORMS


class CpuArray:
    """fp32 memory of a shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._block = Block(FLOAT_BYTES * math.prod(shape))
        self.address = self._block.address

    def host(self, n_rows: int) -> HostArray:
        """A view of the first rows."""
        shape = (n_rows, *self.shape[1:])
        nbytes = FLOAT_BYTES * math.prod(shape)
        return HostArray(DType.F32, shape, self._block.view(nbytes))

    def load(self, host: HostArray) -> None:
        """Write F32 rows of its width over the first ones. ValueError if they are too many."""
        self._block.view(self._block.nbytes)[: host.nbytes] = host.data


class CpuStep:
    """What changes from call to call, in memory the ops read."""

    def __init__(self, max_tokens: int) -> None:
        ids, positions, rows = ((c_int32 * max_tokens)() for _ in range(3))
        spans = (abi.Span * max_tokens)()
        self.native = abi.Step(
            token_ids=ctypes.addressof(ids),
            positions=ctypes.addressof(positions),
            rows=ctypes.addressof(rows),
            spans=ctypes.addressof(spans),
        )
        # Views take values several times faster than ctypes arrays do; they keep them alive.
        self._ids, self._positions, self._rows, self._spans = (
            memoryview(held).cast("B").cast("i") for held in (ids, positions, rows, spans)
        )

    @property
    def n_tokens(self) -> int:
        """T."""
        return int(self.native.n_tokens)

    @property
    def n_rows(self) -> int:
        """R."""
        return int(self.native.n_rows)

    def set(self, token_ids: Sequence[int], spans: Sequence[Span], rows: Sequence[int]) -> None:
        """Describe the next call; see ``kernels/ops.py``."""
        native = self.native
        n, n_rows = len(token_ids), len(rows)
        native.n_tokens, native.n_rows, native.n_spans = n, n_rows, len(spans)
        self._ids[:n] = array("i", token_ids)
        self._rows[:n_rows] = array("i", rows)
        at = 0
        for span in spans:
            start, count, position = span.start, span.count, span.position
            self._spans[at : at + SPAN_INTS] = array("i", (span.slot, start, count, position))
            self._positions[start : start + count] = array("i", range(position, position + count))
            at += SPAN_INTS


class CpuKvLayer:
    """Keys and values of one layer: [slots, Hkv, capacity, dh] each.

    Pages that are never written cost address space only, so the whole context is reserved and the
    addresses in recorded programs stay right. ``programs`` are the last ones recorded for caches
    whose first layer this is.
    """

    def __init__(self, n_slots: int, capacity: int, heads: Heads, form: str) -> None:
        kind, self._element_bytes = KV_TYPES[form]
        self._head_bytes = capacity * heads.head_dim * self._element_bytes
        half = n_slots * heads.n_kv_heads * self._head_bytes
        self._block = Block(2 * half)
        self.nbytes = 2 * half
        self.programs: Recent[object, Program] = Recent(PROGRAMS)
        self.native = abi.Kv(
            n_slots=n_slots,
            capacity=capacity,
            n_kv_heads=heads.n_kv_heads,
            head_dim=heads.head_dim,
            type=kind,
            keys=self._block.address,
            values=self._block.address + half,
        )

    @property
    def address(self) -> int:
        """Address of the native description."""
        return ctypes.addressof(self.native)

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        native = self.native
        nbytes = n_tokens * native.head_dim * self._element_bytes
        for part in (native.keys, native.values):
            for head in range(native.n_kv_heads):
                origin = part + (source * native.n_kv_heads + head) * self._head_bytes
                goal = part + (target * native.n_kv_heads + head) * self._head_bytes
                ctypes.memmove(goal, origin, nbytes)
