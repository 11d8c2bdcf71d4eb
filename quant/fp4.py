"""Schemes ``fp4``, ``fp4-dq``: 4-bit floating point of bitsandbytes, a scale per 64 weights.

Each weight becomes the nearest of 16 table entries, signed values with a 2-bit exponent and a
1-bit mantissa, times the largest magnitude of its block. With ``-dq`` these magnitudes are
quantized to 8 bits too.
"""

from llmrun.quant.lut16 import scheme

SCHEMES = (
    scheme("fp4", "4-bit floating point of bitsandbytes, a scale per 64 weights", "fp4"),
    scheme("fp4-dq", "fp4 with scales of 8 bits (double quantization)", "fp4", nested=True),
)
