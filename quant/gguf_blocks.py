"""GGUF's quantized blocks as storage forms: codes are rearranged, never changed.

Scales and minima of the 32-weight types keep their 16 bits; MXFP4's, powers of two, are exact in
bf16. Those of the K types and IQ4_XS are products of two numbers in the file, exact in fp32; by
default they are rounded once to f16, which adds about 5e-7 of relative squared error to Q4_K's
weights and 4e-8 to Q6_K's. The work is done by the native library, when somebody looks at the
arrays, or at once by torch where there is none (``kernels.reference.gguf``); both give the same
bytes.
"""

import functools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmrun.kernels.cpu import gguf as native
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.forms import Blocks, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray, LaterArray, empty

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""The numbers that 4 bits with two of exponent and one of mantissa stand for. GGUF's own reading
knows no negative zero."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How GGUF stores a quantized type, and the form it becomes.

    ``number``: GGUF's own; ``weights`` and ``nbytes`` of one block. ``bits``, ``group``, ``mins``:
    those of the ``GroupInt``, or with a ``table`` of the ``Lut16``. ``products``: scales and
    minima are products, so that they are exact in fp32 only; otherwise they are of type ``scale``.
    """

    number: int
    weights: int
    nbytes: int
    bits: int
    group: int
    mins: bool = False
    products: bool = False
    table: tuple[float, ...] | None = None
    scale: DType = DType.F16

    @property
    def bits_per_weight(self) -> float:
        """Of the form with 16-bit scales, table aside; it may be more than the file takes."""
        return self.bits + 16 * (1 + self.mins) / self.group

    @property
    def form_kind(self) -> str:
        """The kind of the form it becomes."""
        name = f"int{self.bits}" if self.table is None else "lut4"
        return f"{name} g{self.group}{' +min' if self.mins else ''}"

    def form(
        self,
        codes: HostArray,
        scales: HostArray,
        mins: HostArray | None,
        shape: tuple[int, int],
        blocks: Blocks | None = None,
    ) -> GroupInt | Lut16:
        """The storage form that holds these arrays."""
        if self.table is None:
            return GroupInt(self.bits, self.group, codes, scales, mins, shape, blocks)
        numbers = memoryview(bytearray(struct.pack("<16f", *self.table)))
        table = HostArray(DType.F32, (16,), numbers)
        return Lut16(self.group, codes, table, scales, shape, blocks)


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(2, 32, 18, bits=4, group=32),
    "Q4_1": BlockType(3, 32, 20, bits=4, group=32, mins=True),
    "Q5_0": BlockType(6, 32, 22, bits=8, group=32),
    "Q5_1": BlockType(7, 32, 24, bits=8, group=32, mins=True),
    "Q8_0": BlockType(8, 32, 34, bits=8, group=32),
    "Q2_K": BlockType(10, 256, 84, bits=4, group=16, mins=True, products=True),
    "Q3_K": BlockType(11, 256, 110, bits=4, group=16, products=True),
    "Q4_K": BlockType(12, 256, 144, bits=4, group=32, mins=True, products=True),
    "Q5_K": BlockType(13, 256, 176, bits=8, group=32, mins=True, products=True),
    "Q6_K": BlockType(14, 256, 210, bits=8, group=16, products=True),
    "IQ4_NL": BlockType(20, 32, 18, bits=4, group=32, table=_IQ4),
    "IQ4_XS": BlockType(23, 256, 136, bits=4, group=32, products=True, table=_IQ4),
    "MXFP4": BlockType(39, 32, 17, bits=4, group=32, table=_E2M1, scale=DType.BF16),
}
"""The types ``unblock`` reads, by the name GGUF gives them."""


def unblock(
    kind: str,
    raw: HostArray,
    shape: tuple[int, int],
    refusal: Callable[[Form], Exception],
    *,
    exact: bool = False,
) -> GroupInt | Lut16:
    """Return the [N, K] weight of ``raw`` (u8, flat, whole rows of blocks) as a storage form.

    ``exact``: scales and minima that are products in F32 instead of F16. Where one of them is not
    finite, ``refusal(form)`` is raised: now, or when the arrays are first looked at.
    """
    stored = BLOCK_TYPES[kind]
    n, k = shape
    count = n * k // stored.weights
    if k % stored.weights or raw.nbytes != count * stored.nbytes:
        raise ValueError(f"{kind} {shape}: {raw.nbytes} bytes")
    dtype = DType.F32 if exact and stored.products else stored.scale
    wide, narrow = (n, k * stored.bits // 8), (n, k // stored.group)

    @functools.cache
    def unpacked() -> GroupInt | Lut16:
        mins = empty(dtype, narrow) if stored.mins else None
        arrays = empty(DType.U8, wide), empty(dtype, narrow), mins
        form = stored.form(*arrays, shape)
        if problem() is None:
            finite = native.unpack(stored.number, raw, count, *arrays) == 0
        else:
            from llmrun.kernels.reference import gguf as with_torch

            finite = with_torch.unpack(kind, raw, count, *arrays)
        if not finite:
            raise refusal(form)
        return form

    if problem() is not None:
        return unpacked()
    return stored.form(
        LaterArray(DType.U8, wide, lambda: unpacked().codes.data),
        LaterArray(dtype, narrow, lambda: unpacked().scales.data),
        LaterArray(dtype, narrow, lambda: unpacked().arrays["mins"].data) if stored.mins else None,
        shape,
        Blocks(
            stored.number,
            HostArray(DType.U8, (n, raw.nbytes // n), raw.data),
            k // stored.weights,
            unpacked,
        ),
    )
