"""MXFP4 of the Open Compute Project: 4-bit floats in blocks of 32 that share a power of two.

A scale byte e stands for 2^(e - 127), exact in bf16 down to e = 0. numpy is imported on first use.
"""

import struct

from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.arrays import unsigned

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What each 4-bit code stands for: sign, 2 bits of exponent, 1 of mantissa."""

LARGEST_EXPONENT = 252
"""The largest scale byte under which every code stays finite in fp32; 255 means NaN."""


def table() -> HostArray:
    """Return the 16 values as F32."""
    return HostArray(DType.F32, (16,), memoryview(bytearray(struct.pack("<16f", *E2M1))))


def too_large(exponents: HostArray) -> int | None:
    """Return the flat index of the first scale byte that is no finite scale, None if all are."""
    import numpy as np

    bad = np.flatnonzero(unsigned(exponents).reshape(-1) > LARGEST_EXPONENT)
    return int(bad[0]) if bad.size else None


def scales(exponents: HostArray, shape: tuple[int, int]) -> HostArray:
    """Return scale bytes as BF16 of another shape: the byte is the exponent field of 2^(e - 127).

    2^-127 is below the normal numbers: half the smallest, its highest mantissa bit.
    """
    import numpy as np

    powers = np.arange(256, dtype=np.uint16) << np.uint16(7)
    powers[0] = 1 << 6
    result = empty(DType.BF16, shape)
    unsigned(result)[...] = powers[unsigned(exponents).reshape(shape)]
    return result
