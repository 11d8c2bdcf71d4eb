"""Scheme ``nf4``: 4-bit NormalFloat as bitsandbytes makes it, one fp32 scale per 64 weights.

Each weight becomes the nearest of 16 table entries, quantiles of a normal distribution, times
the largest magnitude of its block.
"""

from functools import partial

from llmrun.quant.lut16 import GROUP, REASON_UNPUBLISHABLE, bits_per_weight, quantize
from llmrun.quant.scheme import Scheme

SCHEME = Scheme(
    name="nf4",
    summary="4-bit NormalFloat of bitsandbytes, a scale per 64 weights",
    family="lut4",
    group=GROUP,
    publishable=False,
    reason_unpublishable=REASON_UNPUBLISHABLE,
    quantize=partial(quantize, kind="nf4"),
    bits_per_weight=bits_per_weight,
)
