"""GGUF's 32-weight blocks as storage forms: codes are rearranged, never changed.

Scales and minima keep their f16 bits, so the weights are exactly those of the file. Importing
this module is cheap; torch is imported when a tensor is read.
"""

from typing import TYPE_CHECKING

from llmrun.kernels.forms import GroupInt
from llmrun.kernels.host import DType, HostArray, empty

if TYPE_CHECKING:
    import torch

BLOCK = 32
"""Weights per block."""

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Bytes of one block of the types ``unblock`` reads: f16 scale, f16 minimum (Q4_1), codes."""

_CHUNK_WORDS = 32_768
"""16-bit words converted at a time. torch splits larger operations over threads, and waiting for
them on a busy machine costs up to a hundred times the work; the temporaries also stay in cache.
"""


def unblock(kind: str, raw: HostArray, shape: tuple[int, int]) -> GroupInt:
    """Return the [N, K] weight of ``raw`` (u8, flat, K // 32 blocks per row) as a storage form.

    Q4_0: 4 bit, symmetric. Q4_1: 4 bit with minima. Q8_0: 8 bit, symmetric. All group 32.
    """
    import torch

    n, k = shape
    count = n * k // BLOCK
    if k % BLOCK or raw.nbytes != count * BLOCK_BYTES[kind]:
        raise ValueError(f"{kind} {shape}: {raw.nbytes} bytes")
    bits = 8 if kind == "Q8_0" else 4
    codes = empty(DType.U8, (n, k * bits // 8))
    scales = empty(DType.F16, (n, k // BLOCK))
    mins = empty(DType.F16, (n, k // BLOCK)) if kind == "Q4_1" else None

    # All three block sizes are even, so a block is a row of 16-bit words.
    blocks = torch.frombuffer(raw.data, dtype=torch.int16).view(count, -1)
    heads = [torch.frombuffer(a.data, dtype=torch.int16) for a in (scales, mins) if a is not None]
    words = blocks[:, len(heads) :]
    target = torch.frombuffer(codes.data, dtype=torch.int16).view(count, -1)
    step = _CHUNK_WORDS // words.shape[1]
    for start in range(0, count, step):
        part = slice(start, start + step)
        for column, head in enumerate(heads):
            head[part].copy_(blocks[part, column])
        if bits == 8:
            # Flipping the sign bit adds 128: -128..127 becomes 0..255.
            torch.bitwise_xor(words[part], -0x7F80, out=target[part])
        else:
            _pair_nibbles(words[part], target[part])
    return GroupInt(bits, BLOCK, codes, scales, mins, shape)


def _pair_nibbles(words: "torch.Tensor", target: "torch.Tensor") -> None:
    """Put elements 2j and 2j + 1 of a block into its byte j; both arguments are i16 [blocks, 8].

    Byte i of a GGUF block holds element i low and element i + 16 high. So the low nibbles,
    squeezed together in order, are the first half of our codes, the high nibbles the second.
    """
    import torch

    packed = words.clone(memory_format=torch.contiguous_format)
    source = packed.view(torch.int64)  # (blocks, 2): bytes 0..7 and 8..15
    nibbles = torch.empty((len(words), 4), dtype=torch.int64)  # low of both, then high of both
    nibbles[:, :2] = source
    torch.bitwise_right_shift(source, 4, out=nibbles[:, 2:])
    nibbles.bitwise_and_(0x0F0F0F0F0F0F0F0F)
    nibbles.bitwise_or_(nibbles >> 4).bitwise_and_(0x00FF00FF00FF00FF)
    nibbles.bitwise_or_(nibbles >> 8).bitwise_and_(0x0000FFFF0000FFFF)
    nibbles.bitwise_or_(nibbles >> 16)
    # The result is the low 32 bits of each 64.
    target.view(torch.int32).copy_(nibbles.view(torch.int32)[:, 0::2])
