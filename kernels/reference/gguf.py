"""GGUF's blocks unpacked with torch: what is fallen back to without the native library.

Same arrays, same bytes. Layouts as in ggml-common.h of the ggml project.
"""

import math
from collections.abc import Callable, Mapping

import torch

from llmrun.kernels.host import HostArray
from llmrun.kernels.reference.arrays import as_tensor

_CHUNK_BYTES = 32_768
"""Bytes converted at a time. torch splits larger operations over threads, and waiting for them on
a busy machine costs up to a hundred times the work; the temporaries also stay in cache."""

Parts = tuple[torch.Tensor, ...]
"""Codes u8 [blocks, bytes] as the form has them; scales and minima [blocks, groups], f16, bf16 or
f32."""


def unpack(
    kind: str,
    blocks: HostArray,
    n_blocks: int,
    codes: HostArray,
    scales: HostArray,
    mins: HostArray | None,
) -> bool:
    """Fill ``codes`` and ``scales`` (and ``mins``) from ``n_blocks`` blocks of a type.

    Returns whether all scales and minima are finite.
    """
    read = _READERS[kind]
    source = as_tensor(blocks).view(n_blocks, -1)
    targets = [
        as_tensor(array).view(n_blocks, -1) for array in (codes, scales, mins) if array is not None
    ]
    step = _CHUNK_BYTES // source.shape[1]
    total = torch.zeros((), dtype=torch.float64)  # finite if and only if every summand is
    for start in range(0, n_blocks, step):
        part = slice(start, start + step)
        for values, target in zip(read(source[part]), targets, strict=True):
            target[part] = values
            if target.is_floating_point():
                total += target[part].sum(dtype=torch.float64)
    return math.isfinite(total.item())


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The f16 number at a byte of every block: [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _pairs(data: torch.Tensor, chunk: int) -> torch.Tensor:
    """Of each ``chunk`` bytes the low nibbles, then the high ones; two in a byte, even ones low."""
    words = data.contiguous().view(torch.int16).view(len(data), -1, chunk // 2)
    paired = torch.empty((len(data), words.shape[1], 2, chunk // 2), dtype=torch.uint8)
    paired[:, :, 0] = (words & 0x0F).bitwise_or_((words >> 4).bitwise_and_(0xF0))
    paired[:, :, 1] = (words >> 4).bitwise_and_(0x0F).bitwise_or_((words >> 8).bitwise_and_(0xF0))
    return paired.flatten(1)


def _nibbles(data: torch.Tensor, chunk: int) -> torch.Tensor:
    """Of each ``chunk`` bytes the low nibbles, then the high ones; one in a byte."""
    chunks = data.reshape(len(data), -1, 1, chunk)
    return torch.cat((chunks & 15, chunks >> 4), 2).flatten(1)


def _bits(data: torch.Tensor, step: int) -> torch.Tensor:
    """[..., bytes] -> [..., 8 // step, bytes]: ``step`` bits of all bytes, low ones first."""
    shifts = torch.arange(0, 8, step, dtype=torch.uint8)[:, None]
    return torch.bitwise_and(data[..., None, :] >> shifts, 2**step - 1)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _pairs(blocks[:, 2:], 16), _half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _pairs(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Parts:
    return _fifth_bits(blocks[:, 2:]) + (128 - 16), _half(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> Parts:
    return _fifth_bits(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    # Bit i of the four bytes before the nibbles belongs to weight i.
    fifth = _bits(data[:, :4], 1).transpose(1, 2).flatten(1)
    return _nibbles(data[:, 4:], 16) | (fifth << 4)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:] ^ 0x80, _half(blocks, 0)  # signed -> + 128


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _pairs(blocks[:, 16:], 32), *_scales_and_mins(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    # Bit j of byte i belongs to weight i of sub-block j.
    fifth = _bits(blocks[:, 16:48], 1).flatten(1)
    return _nibbles(blocks[:, 48:], 32) | (fifth << 4), *_scales_and_mins(blocks)


def _scales_and_mins(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high, both = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, (both & 15) | ((low >> 6) << 4)), 1)
    mins = torch.cat((high & 63, (both >> 4) | ((high >> 6) << 4)), 1)
    d, dmin = _half(blocks, 0).float(), _half(blocks, 2).float()
    return d * scales, -(dmin * mins)


def _q6_k(blocks: torch.Tensor) -> Parts:
    # Each half of a block: 64 bytes of nibbles, low ones first; two more bits of weights l, 32 + l,
    # 64 + l and 96 + l in byte l of 32.
    low = _nibbles(blocks[:, :128], 64)
    high = torch.cat([_bits(blocks[:, at : at + 32], 2).flatten(1) for at in (128, 160)], 1)
    scales = _half(blocks, 208).float() * blocks[:, 192:208].view(torch.int8)
    return (low | (high << 4)) + (128 - 32), scales


def _q2_k(blocks: torch.Tensor) -> Parts:
    # Pair p of bits of byte l of each 32 belongs to weight 32 p + l.
    codes = _adjacent(_bits(blocks[:, 16:80].reshape(-1, 2, 32), 2).flatten(1))
    d, dmin = _half(blocks, 80).float(), _half(blocks, 82).float()
    return codes, d * (blocks[:, :16] & 15), -(dmin * (blocks[:, :16] >> 4))


def _q3_k(blocks: torch.Tensor) -> Parts:
    # Codes as of Q2_K, less 4 where bit j of byte l is clear for weight 32 j + l.
    low = _bits(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    high = _bits(blocks[:, :32], 1).flatten(1)
    nibbles = blocks[:, 96:104]
    sixths = torch.cat((nibbles & 15, nibbles >> 4), 1) | (
        _bits(blocks[:, 104:108], 2).flatten(1) << 4
    )
    scales = _half(blocks, 108).float() * (sixths.view(torch.int8) - 32)
    return _adjacent((low | (high << 2)) + (8 - 4)), scales


def _adjacent(codes: torch.Tensor) -> torch.Tensor:
    """[blocks, columns] -> two in a byte, even ones low."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    low = blocks[:, 4:8]
    nibbles = torch.stack((low & 15, low >> 4), 2).flatten(1)
    high = _bits(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    scales = (nibbles | (high << 4)).view(torch.int8) - 32
    return _pairs(blocks[:, 8:], 16), _half(blocks, 0).float() * scales


def _mxfp4(blocks: torch.Tensor) -> Parts:
    exponents = blocks[:, :1].to(torch.int16)
    # The least power is a subnormal number of bf16.
    scales = torch.where(exponents == 0, 0x40, exponents << 7).to(torch.int16).view(torch.bfloat16)
    nibbles = blocks[:, 1:].clone(memory_format=torch.contiguous_format)  # an even address
    return _pairs(nibbles, 16), scales


_READERS: Mapping[str, Callable[[torch.Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _q4_0,  # the same layout
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
