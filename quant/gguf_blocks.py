"""GGUF's quantized blocks as storage forms: codes are rearranged, never changed.

Scales and minima of the 32-weight types keep their f16 bits. Those of the K types are products of
two numbers in the file, exact in fp32; by default they are rounded once to f16, which adds about
5e-7 of relative squared error to Q4_K's weights and 4e-8 to Q6_K's. The work is done by the native
library, or by torch where there is none (``gguf_torch``); both give the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llmrun.errors import UnavailableError
from llmrun.kernels.cpu import gguf as native
from llmrun.kernels.forms import GroupInt
from llmrun.kernels.host import DType, HostArray, empty


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
    kind: str, raw: HostArray, shape: tuple[int, int], *, exact: bool = False
) -> tuple[GroupInt, bool]:
    """Return the [N, K] weight of ``raw`` (u8, flat, whole rows of blocks) as a storage form, and
    whether all its scales and minima are finite.

    ``exact``: scales and minima of the K types in F32 instead of F16.
    """
    stored = BLOCK_TYPES[kind]
    n, k = shape
    count = n * k // stored.weights
    if k % stored.weights or raw.nbytes != count * stored.nbytes:
        raise ValueError(f"{kind} {shape}: {raw.nbytes} bytes")
    dtype = DType.F32 if exact and stored.products else DType.F16
    codes = empty(DType.U8, (n, k * stored.bits // 8))
    scales = empty(dtype, (n, k // stored.group))
    mins = empty(dtype, (n, k // stored.group)) if stored.mins else None
    try:
        finite = native.unpack(stored.number, raw, count, codes, scales, mins) == 0
    except UnavailableError:
        from llmrun.quant import gguf_torch

        finite = gguf_torch.unpack(kind, raw, count, codes, scales, mins)
    return GroupInt(stored.bits, stored.group, codes, scales, mins, shape), finite
