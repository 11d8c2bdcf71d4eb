"""Rounding to fewer bits inside kernels: to the nearest, ties to even, interpreted or compiled."""

import triton
import triton.language as tl

from llmrun.kernels.gpu.mode import interpreted

_INTERPRETED = tl.constexpr(interpreted())
_INTEGERS = tl.constexpr(float(3 << 22))  # fp32 has no fractions from here up to 2^24


@triton.jit
def to_bf16(x: tl.tensor) -> tl.tensor:
    """fp32 as bf16. (The interpreter's own conversion would cut the low bits off.)"""
    if _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def nearest_integer(x: tl.tensor) -> tl.tensor:
    """The integer nearest to an fp32 number below 2^22 in size, as fp32."""
    return (x + _INTEGERS) - _INTEGERS
