"""Storage forms: how one weight lies in memory. Kernels are written per form, never per scheme.

All forms are row-major with K (input features) last and contiguous; N is output features. The
formulas give the weight in fp32. A form that takes part in arithmetic needs no other description.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmrun.kernels.host import DType, HostArray, LaterArray

ROW = 0
"""``group`` value: one group spans the whole row."""


@dataclass(frozen=True, eq=False)
class Dense:
    """``w``: [N, K] (or any shape for norms and biases), bf16, f16 or f32."""

    w: HostArray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.w.shape

    @property
    def arrays(self) -> dict[str, HostArray]:
        """The arrays by name."""
        return {"w": self.w}

    @property
    def kind(self) -> str:
        """Short name for tables, e.g. ``bf16``."""
        return self.w.dtype.name.lower()


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a GGUF file that a form was made from, for backends that read them.

    ``type``: GGUF's number. ``raw``: u8 [rows, bytes of a row]. ``row_blocks``: blocks of a row.
    ``order``: the row of ``raw`` for each row of the weight; None: as they are. ``check()`` raises
    the ModelFileError for scales or minima that are not finite; whoever meets some calls it.
    """

    type: int
    raw: HostArray
    row_blocks: int
    check: Callable[[], object]
    order: Sequence[int] | None = None

    def rows(self, picked: Sequence[int]) -> "Blocks":
        """The blocks of some rows of the weight."""
        order = picked if self.order is None else [self.order[row] for row in picked]
        return replace(self, order=order)


@dataclass(frozen=True, eq=False)
class GroupInt:
    """Integer codes with a scale per group along K.

    ``bits`` 4: ``codes`` u8 [N, K/2], low nibble = even k, u = 0..15.
    ``bits`` 8: ``codes`` u8 [N, K], u = 0..255.
    ``group`` 16, 32, 64, 128 or ``ROW``; K % group == 0. ``scales`` [N, K/group] (f16, bf16 or
    f32, possibly negative); ``mins`` like ``scales``, or u8 zero points z, or None.
    Weight: ``s * (u - 2**(bits-1))`` without mins, ``s * u + m`` with mins, where a zero point
    stands for ``m = -(s * z)``; products and sums are rounded to fp32 one by one.
    ``columns`` I32 [K]: column j of the codes multiplies input ``columns[j]``; None: j itself. GPTQ
    orders them by importance, so that a group holds columns alike.
    ``blocks``: the same weight as a GGUF file has it. Then the arrays are unpacked from them when
    they are first looked at, which a backend that packs weights from blocks never does.
    """

    bits: int
    group: int
    codes: HostArray
    scales: HostArray
    mins: HostArray | None
    shape: tuple[int, int]
    blocks: Blocks | None = None
    columns: HostArray | None = None

    def __post_init__(self) -> None:
        n, k = self.shape
        group = self.group or k
        if self.bits not in (4, 8) or k % group or k * self.bits % 8:
            raise ValueError(f"GroupInt {self.bits} bit, group {self.group}: shape {self.shape}")
        _expect("codes", self.codes, (n, k * self.bits // 8), (DType.U8,))
        _expect("scales", self.scales, (n, k // group), FLOATS)
        if self.mins is not None:
            _expect("mins", self.mins, (n, k // group), (*FLOATS, DType.U8))
        if self.columns is not None:
            _expect("columns", self.columns, (k,), (DType.I32,))

    @property
    def arrays(self) -> dict[str, HostArray]:
        """The arrays by name."""
        arrays = {"codes": self.codes, "scales": self.scales}
        more = {"mins": self.mins, "columns": self.columns}
        return arrays | {name: array for name, array in more.items() if array is not None}

    @property
    def kind(self) -> str:
        """Short name for tables, e.g. ``int4 g32``, ``int4 g32 +min`` or ``int4 g32 +zero``."""
        name = f"int{self.bits} {f'g{self.group}' if self.group else 'row'}"
        if self.mins is None:
            return name
        return f"{name} {'+zero' if self.mins.dtype is DType.U8 else '+min'}"


@dataclass(frozen=True, eq=False)
class Lut16:
    """Four-bit indices into a table of 16 values with a scale per group along K.

    ``codes`` as in GroupInt 4; ``table`` f32 [16]; ``scales`` [N, K/group]; group 32, 64 or 128.
    Weight: ``s * table[u]``. ``blocks`` as in GroupInt.
    """

    group: int
    codes: HostArray
    table: HostArray
    scales: HostArray
    shape: tuple[int, int]
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        n, k = self.shape
        if k % self.group or k % 2:
            raise ValueError(f"Lut16, group {self.group}: shape {self.shape}")
        _expect("codes", self.codes, (n, k // 2), (DType.U8,))
        _expect("table", self.table, (16,), (DType.F32,))
        _expect("scales", self.scales, (n, k // self.group), FLOATS)

    @property
    def arrays(self) -> dict[str, HostArray]:
        """The arrays by name."""
        return {"codes": self.codes, "table": self.table, "scales": self.scales}

    @property
    def kind(self) -> str:
        """Short name for tables, e.g. ``lut4 g64``."""
        return f"lut4 g{self.group}"


Form = Dense | GroupInt | Lut16
FLOATS = (DType.F32, DType.F16, DType.BF16)


def nbytes(form: Form) -> int:
    """Bytes of all arrays of a form, scales, minima and table included."""
    return sum(array.nbytes for array in form.arrays.values())


def parameters(form: Form) -> int:
    """Number of weights a form stands for."""
    count = 1
    for extent in form.shape:
        count *= extent
    return count


def bits_per_weight(form: Form) -> float:
    """Effective bits per weight: 8 * all bytes / weights."""
    return 8 * nbytes(form) / parameters(form)


def rows(form: Form, picked: Sequence[int]) -> Form:
    """Return the same weight with its rows gathered in an order (a permutation or a subset).

    Moves bytes only, so codes and scales stay bit for bit what they were; rows that follow each
    other (a ``range``) are not even copied.
    """
    if isinstance(form, Dense):
        return Dense(_take(form.w, picked))
    shape = (len(picked), form.shape[1])
    codes, scales = _take(form.codes, picked), _take(form.scales, picked)
    blocks = None if form.blocks is None else form.blocks.rows(picked)
    if isinstance(form, Lut16):
        return Lut16(form.group, codes, form.table, scales, shape, blocks)
    mins = None if form.mins is None else _take(form.mins, picked)
    return GroupInt(form.bits, form.group, codes, scales, mins, shape, blocks, form.columns)


def matrix(form: Form, *, vector: bool = False, transposed: bool = False) -> Form:
    """Return a stack of matrices [E, N, K] as one matrix [E * N, K], rows one after another.

    ``vector``: a stack of vectors as one vector. ``transposed``: each [K, N] is turned around
    first, which is done for dense forms only (ValueError for others).
    """
    if not isinstance(form, Dense):
        if transposed:
            raise ValueError(f"{form.kind} cannot be transposed")
        return form  # quantized stacks are matrices already
    array = form.w
    if transposed:
        return Dense(_TurnedRows(array))
    shape = (array.size,) if vector else (array.size // array.shape[-1], array.shape[-1])
    if shape == form.shape:
        return form
    return Dense(LaterArray(array.dtype, shape, lambda: array.data))


class _TurnedRows(LaterArray):
    """The columns of matrices [E, K, N] as rows [E * N, K].

    Whoever picks rows gets those made and no others: a stack of experts is never there twice.
    """

    def __init__(self, source: HostArray) -> None:
        *outer, k, n = source.shape
        count = math.prod(outer) * n
        super().__init__(source.dtype, (count, k), lambda: self.made(range(count)))
        self.__dict__["_source"] = source

    def made(self, picked: Sequence[int]) -> memoryview:
        """The bytes of some rows."""
        source: HostArray = self.__dict__["_source"]
        k, n = source.shape[-2:]
        code: Literal["H", "I"] = "H" if source.dtype.bits == 16 else "I"
        numbers = source.data.cast("B").cast(code)
        turned = memoryview(bytearray(len(picked) * k * numbers.itemsize)).cast(code)
        for place, row in enumerate(picked):
            matrix, column = divmod(row, n)
            start, stop = matrix * k * n, (matrix + 1) * k * n
            turned[place * k : (place + 1) * k] = numbers[start + column : stop : n]
        return turned.cast("B")


def _take(source: HostArray, picked: Sequence[int]) -> HostArray:
    stride = source.nbytes // source.shape[0]

    def gathered() -> memoryview:
        if isinstance(source, _TurnedRows):
            return source.made(picked)
        data = source.data
        if isinstance(picked, range) and picked.step == 1:
            return data[picked.start * stride : picked.stop * stride]
        return memoryview(
            bytearray().join([data[row * stride : (row + 1) * stride] for row in picked])
        )

    return LaterArray(source.dtype, (len(picked), *source.shape[1:]), gathered)


def _expect(name: str, array: HostArray, shape: tuple[int, ...], dtypes: tuple[DType, ...]) -> None:
    if array.shape != shape or array.dtype not in dtypes:
        wanted = "/".join(dtype.name for dtype in dtypes)
        raise ValueError(f"{name}: {array.dtype.name} {array.shape}, expected {wanted} {shape}")
