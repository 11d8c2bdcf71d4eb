"""Scheme ``nl4``: 4-bit codes into 16 uneven levels, with signed searched scales.

Levels are whole numbers in -127..127; one is 0, so that zeros stay zeros. They are those of least
squared error for weights like those of language models, which are alike once a group is divided by
its scale: levels fitted to each weight, or with the importance of columns, gain nothing.
"""

import struct

from llmrun.kernels.forms import Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.compensation import Prepared, as_prepared
from llmrun.quant.inputs import Inputs
from llmrun.quant.scheme import Scheme, group_for
from llmrun.quant.search import Grid, search

GROUP = 32

LEVELS = (-127, -99, -79, -62, -47, -34, -21, -10, 0, 12, 23, 35, 49, 64, 82, 107)
"""SmolLM2-135M, KL divergence with importance: .091 with levels like these, .102 with those of
GGUF's IQ4_NL, .100 with levels fitted to the weighted error, and 1.5 with levels fitted to errors
that count by w^2, which leave none for small weights."""


def table() -> HostArray:
    """The levels as F32 [16]."""
    return HostArray(DType.F32, (16,), memoryview(bytearray(struct.pack("<16f", *LEVELS))))


def quantize(host: HostArray, inputs: Inputs | Prepared | None = None) -> Lut16:
    """Quantize [N, K] (bf16, f16 or f32); scales have the weight's own type.

    ModelFileError for a weight that is not finite, ValueError if 32 does not divide K.
    """
    group, levels = group_for(GROUP, host.shape[1]), table()
    found = search(host, Grid.TABLE, group, as_prepared(inputs), levels)
    return Lut16(group, found.codes, levels, found.scales, (host.shape[0], host.shape[1]))


def bits_per_weight(shape: tuple[int, int], dtype: DType = DType.BF16) -> float:
    """Bits per weight for [N, K] of ``dtype``, the table of 64 bytes included: 4.5 and a little."""
    n, k = shape
    return 4 + dtype.bits / group_for(GROUP, k) + 512 / (n * k)


SCHEME = Scheme(
    name="nl4",
    summary="4-bit codes into 16 uneven levels, searched scale per 32 weights",
    family="lut4",
    group=GROUP,
    weighted=True,
    quantize=quantize,
    bits_per_weight=bits_per_weight,
)
