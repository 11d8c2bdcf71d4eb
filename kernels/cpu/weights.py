"""Weights of the CPU backend: storage forms packed into panels of 16 rows (docs/cpu-kernels.md).

Packing is put off until enough weights have come for all threads to work on them without waiting
for each other, and without Python's lock: meanwhile the tokenizer is built. Weights of GGUF files
are packed from the blocks of the file, so no other copy of them is ever made.
"""

import ctypes
import math
import struct
from collections.abc import Sequence
from ctypes import POINTER, c_int32, pointer
from dataclasses import dataclass

from llmrun.errors import DoesNotFitError, UnavailableError
from llmrun.kernels.cpu import abi
from llmrun.kernels.cpu.library import library
from llmrun.kernels.cpu.memory import Arena, address_of
from llmrun.kernels.forms import ROW, Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray

ROWS = 16
ROW_PADDING = 128
"""Columns are padded to a multiple of this where one scale covers the whole row."""

WIDENED_GROUP = 16
"""Four-bit codes in groups of so many columns are packed as eight-bit codes that weigh the same."""

BATCH_BYTES = 32 << 20
"""Packed when so many bytes wait: what waits may be memory that packing sets free."""

TYPES = {DType.F16: abi.F16, DType.BF16: abi.BF16, DType.F32: abi.F32, DType.U8: abi.U8}

UNIT_RANGE = 2.0**-64, 2.0**64
"""Units of a table's levels: a scale times one stays far from the ends of fp32."""


@dataclass(frozen=True, eq=False)
class CpuWeight:
    """A packed weight; ``native`` is what ops point at, in ``memory``.

    ``order``: int32 of its columns' inputs.
    """

    shape: tuple[int, int]
    nbytes: int
    kind: str
    native: abi.Weight
    memory: Arena
    order: bytes | None = None

    @property
    def address(self) -> int:
        """Address of the native description."""
        return ctypes.addressof(self.native)


class Packer:
    """Packs weights with ``threads`` threads into memory of the arena.

    ``exact``: 4-bit codes become 8-bit ones, beside which activations have 16 bits, and tables are
    multiplied in fp32, whatever is in them. What ``add``
    returns may be pointed at, but it holds nothing before ``finish``. Either raises ModelFileError
    for blocks that hold numbers which are not finite.
    """

    def __init__(self, arena: Arena, threads: int, *, exact: bool = False) -> None:
        self._arena = arena
        self._exact = exact
        self._threads = threads
        self._waiting: list[tuple[CpuWeight, Form]] = []
        self._waiting_bytes = 0

    def add(self, form: Form) -> CpuWeight:
        """Take over a 2-D weight. UnavailableError for a form no kernel serves."""
        n, k = form.shape
        native = _describe(form, n, k, self.widens(form.kind), exact=self._exact)
        parts = _part_bytes(native, form)
        for name, nbytes in parts.items():
            setattr(native, name, self._arena.take(nbytes))
        kind = form.kind
        if isinstance(form, GroupInt) and form.bits == 4 and native.kind == abi.W8:
            kind = kind.replace("int4", "int8")
        order = bytes(form.columns.data) if isinstance(form, GroupInt) and form.columns else None
        if order is not None:
            ctypes.memmove(native.order, order, parts["order"])
        nbytes = sum(parts.values())
        weight = CpuWeight((native.n, native.k), nbytes, kind, native, self._arena, order)
        if isinstance(form, Lut16):
            ctypes.memmove(native.table, bytes(form.table.data), parts["table"])
        self._waiting.append((weight, form))
        self._waiting_bytes += weight.nbytes
        if self._waiting_bytes >= BATCH_BYTES:
            self.finish()
        return weight

    def widens(self, kind: str) -> bool:
        """Whether 4-bit codes of a form's kind are packed as 8-bit ones."""
        return kind.startswith("int4" if self._exact else f"int4 g{WIDENED_GROUP}")

    def finish(self) -> None:
        """Pack what waits. DoesNotFitError without memory."""
        if not self._waiting:
            return
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        count = len(waiting)
        sources, alive = (abi.Source * count)(), []
        for (_, form), source in zip(waiting, sources, strict=True):
            alive.append(_fill(source, form))
        weights = (POINTER(abi.Weight) * count)(*(pointer(weight.native) for weight, _ in waiting))
        result = library().llmr_pack(weights, sources, count, self._threads)
        if result < 0:
            raise DoesNotFitError(
                "there is no memory to pack weights with", "use a smaller model or close programs"
            )
        if result > 0:
            damaged = waiting[result - 1][1]
            assert not isinstance(damaged, Dense)
            assert damaged.blocks is not None
            damaged.blocks.check()


def refusal(kind: str) -> str | None:
    """Why a storage form's kind (``Form.kind``) is not served; None if it is."""
    if kind.startswith("lut4 g16"):
        return "tables need groups of 32 columns or more"
    return None


def integer_levels(table: HostArray) -> tuple[float, tuple[int, ...]] | None:
    """A table as ``unit * levels``, exactly: a power of two and integers -128..127.

    None if there are none, as for nf4. Entries of no size have level 0, whatever their sign.
    """
    values = struct.unpack("<16f", table.data)
    if not all(math.isfinite(value) for value in values):
        return None
    sizes = [abs(value).as_integer_ratio() for value in values if value]
    # An entry is odd * 2^power; as integers all are multiples of the least power of two.
    unit = min(((n & -n) / d for n, d in sizes), default=1.0)
    levels = [value / unit for value in values]
    if not UNIT_RANGE[0] <= unit <= UNIT_RANGE[1] or min(levels) < -128 or max(levels) > 127:
        return None
    return unit, tuple(int(level) for level in levels)


def _describe(form: Form, n: int, k: int, widened: bool, *, exact: bool) -> abi.Weight:
    native = abi.Weight(n=n, k=k, k_padded=k, panels=-(-n // ROWS))
    if isinstance(form, Dense):
        native.kind, native.type, native.group = abi.DENSE, TYPES[form.w.dtype], k
        return native
    native.type = TYPES[form.scales.dtype]
    native.group = form.group
    if isinstance(form, Lut16):
        _set_levels(native, None if exact else integer_levels(form.table))
    else:
        native.kind = abi.W8 if widened or form.bits == 8 else abi.W4
    if form.group == ROW:
        step = min(ROW_PADDING, -(-k // 32) * 32)
        native.k_padded = native.group = -(-k // step) * step
    reason = refusal(form.kind)
    if reason is None and native.kind != abi.W8 and k % 8:
        reason = "4-bit rows need a multiple of 8 columns"
    if isinstance(form, GroupInt) and form.mins is not None:
        native.min_type = TYPES[form.mins.dtype]
        if reason is None and native.min_type not in (native.type, abi.U8):
            reason = "minima differ in type"
    if reason is not None:
        raise UnavailableError(
            f"the CPU kernels do not serve a {form.kind} weight of shape {n} x {k}: {reason}",
            "choose another scheme with -q",
        )
    return native


def _set_levels(native: abi.Weight, levels: tuple[float, tuple[int, ...]] | None) -> None:
    native.kind = abi.LUT4 if levels is None else abi.LUT8
    if levels is not None:
        native.unit, numbers = levels
        native.levels[:] = numbers


def _part_bytes(native: abi.Weight, form: Form) -> dict[str, int]:
    """Bytes of each array of a packed weight."""
    parts = {"codes": _code_bytes(native)}
    groups = native.panels * ROWS * (native.k_padded // native.group)
    if not isinstance(form, Dense):
        parts["scales"] = groups * form.scales.dtype.bits // 8
    if isinstance(form, GroupInt) and form.mins is not None:
        parts["mins"] = groups * form.mins.dtype.bits // 8
    if isinstance(form, GroupInt) and form.columns is not None:
        parts["order"] = 4 * native.k
    if isinstance(form, Lut16):
        parts["table"] = 64
    return parts


def _fill(source: abi.Source, form: Form) -> Sequence[object]:
    """Say where a weight comes from; returns what must stay alive until it is packed."""
    blocks = None if isinstance(form, Dense) else form.blocks
    if blocks is None:
        source.gguf = -1
        arrays = dict(form.arrays)
        codes = arrays.pop("w" if isinstance(form, Dense) else "codes")
        for packed_apart in ("table", "columns"):
            arrays.pop(packed_apart, None)
    else:
        source.gguf, source.row_blocks = blocks.type, blocks.row_blocks
        codes, arrays = blocks.raw, {}
    source.row_bytes = codes.nbytes // codes.shape[0]
    source.codes, *alive = address_of(codes)
    for name, array in arrays.items():
        address, owner = address_of(array)
        setattr(source, name, address)
        alive.append(owner)
    if blocks is not None and blocks.order is not None:
        order = (c_int32 * len(blocks.order))(*blocks.order)
        source.order = ctypes.addressof(order)
        alive.append(order)
    return alive


def _code_bytes(native: abi.Weight) -> int:
    columns: int = native.panels * ROWS * native.k_padded
    if native.kind == abi.DENSE:
        return columns * (4 if native.type == abi.F32 else 2)
    return columns if native.kind == abi.W8 else columns // 2
