"""GGUF's quantized blocks as storage forms: codes are rearranged, never changed.

Scales and minima of the 32-weight types keep their f16 bits. Those of the K types are products of
two numbers in the file, exact in fp32; by default they are rounded once to f16, which adds about
5e-7 of relative squared error to Q4_K's weights and 4e-8 to Q6_K's. The work is done by the native
library, when somebody looks at the arrays, or at once by torch where there is none
(``kernels.reference.gguf``); both give the same bytes.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmrun.kernels.cpu import gguf as native
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.forms import Blocks, GroupInt
from llmrun.kernels.host import DType, HostArray, LaterArray, empty


@dataclass(frozen=True, slots=True)
class BlockType:
    """How GGUF stores a quantized type, and the ``GroupInt`` it becomes.

    ``number``: GGUF's own; ``weights`` and ``nbytes`` of one block. ``products``: scales and
    minima are products, so that they are exact in fp32 only.
    """

    number: int
    weights: int
    nbytes: int
    bits: int
    group: int
    mins: bool
    products: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Of the ``GroupInt`` with 16-bit scales, which may be more than the file takes."""
        return self.bits + 16 * (1 + self.mins) / self.group


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(2, 32, 18, bits=4, group=32, mins=False),
    "Q4_1": BlockType(3, 32, 20, bits=4, group=32, mins=True),
    "Q5_0": BlockType(6, 32, 22, bits=8, group=32, mins=False),
    "Q5_1": BlockType(7, 32, 24, bits=8, group=32, mins=True),
    "Q8_0": BlockType(8, 32, 34, bits=8, group=32, mins=False),
    "Q4_K": BlockType(12, 256, 144, bits=4, group=32, mins=True, products=True),
    "Q5_K": BlockType(13, 256, 176, bits=8, group=32, mins=True, products=True),
    "Q6_K": BlockType(14, 256, 210, bits=8, group=16, mins=False, products=True),
}
"""The types ``unblock`` reads, by the name GGUF gives them."""


def unblock(
    kind: str,
    raw: HostArray,
    shape: tuple[int, int],
    refusal: Callable[[GroupInt], Exception],
    *,
    exact: bool = False,
) -> GroupInt:
    """Return the [N, K] weight of ``raw`` (u8, flat, whole rows of blocks) as a storage form.

    ``exact``: scales and minima of the K types in F32 instead of F16. Where one of them is not
    finite, ``refusal(form)`` is raised: now, or when the arrays are first looked at.
    """
    stored = BLOCK_TYPES[kind]
    n, k = shape
    count = n * k // stored.weights
    if k % stored.weights or raw.nbytes != count * stored.nbytes:
        raise ValueError(f"{kind} {shape}: {raw.nbytes} bytes")
    dtype = DType.F32 if exact and stored.products else DType.F16
    wide, narrow = (n, k * stored.bits // 8), (n, k // stored.group)

    @functools.cache
    def unpacked() -> GroupInt:
        mins = empty(dtype, narrow) if stored.mins else None
        arrays = empty(DType.U8, wide), empty(dtype, narrow), mins
        form = GroupInt(stored.bits, stored.group, *arrays, shape)
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
    return GroupInt(
        stored.bits,
        stored.group,
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
