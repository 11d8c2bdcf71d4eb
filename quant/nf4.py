"""Schemes ``nf4``, ``nf4-dq``: 4-bit NormalFloat as bitsandbytes makes it, a scale per 64 weights.

Each weight becomes the nearest of 16 table entries, quantiles of a normal distribution, times
the largest magnitude of its block. With ``-dq`` these magnitudes are quantized to 8 bits too.
"""

from llmrun.quant.lut16 import scheme

SCHEMES = (
    scheme("nf4", "4-bit NormalFloat of bitsandbytes, a scale per 64 weights", "nf4"),
    scheme("nf4-dq", "nf4 with scales of 8 bits (double quantization)", "nf4", nested=True),
)
