"""Scheme ``nl4``: 4-bit codes into 16 uneven levels, with signed searched scales.

Levels are whole numbers in -127..127, near those of least squared error for weights like those of
language models, which are alike once a group is divided by its scale. There are two tables. With
0 among its levels, one keeps zeros and is the better one where nothing is known of the inputs.
Without, the codes around 0 are finer: better where the importance of columns is known.
"""

import struct

from llmrun.kernels.forms import Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.arrays import unsigned
from llmrun.quant.compensation import Prepared, as_prepared
from llmrun.quant.inputs import Inputs
from llmrun.quant.scheme import Scheme, group_for
from llmrun.quant.search import Grid, search

GROUP = 32

LEVELS = (-127, -99, -79, -62, -47, -34, -21, -10, 0, 12, 23, 35, 49, 64, 82, 107)
WEIGHED_LEVELS = (-127, -100, -80, -63, -48, -34, -21, -9, 2, 13, 24, 36, 50, 65, 84, 109)
"""KL divergence of SmolLM2-135M with these and with those above: from weights alone .262 and .214,
with importance .096 and .118, with compensation .081 and .091."""

FEWEST_UNITS = 256
"""Least magnitude of a group's largest weight, in units of its type's smallest number, with which
no scale of the search vanishes. A group below has to be kept by codes of 0."""

_PANEL = 1 << 20
"""Weights looked at together."""


def table(levels: tuple[int, ...]) -> HostArray:
    """Levels as F32 [16]."""
    return HostArray(DType.F32, (16,), memoryview(bytearray(struct.pack("<16f", *levels))))


def levels_for(host: HostArray, group: int, inputs: Prepared) -> tuple[int, ...]:
    """The table that suits a weight [N, K] and what is known of its inputs."""
    if inputs.importance is None or _least_magnitude(host, group) < FEWEST_UNITS:
        return LEVELS
    return WEIGHED_LEVELS


def _least_magnitude(host: HostArray, group: int) -> int:
    """The largest magnitude in each group, the least of them all, as the bits of its number.

    Bits without the sign grow with the magnitude; up to the smallest normal numbers they count
    units of the smallest number.
    """
    bits = unsigned(host).reshape(-1, group)
    magnitude = bits.dtype.type((1 << (host.dtype.bits - 1)) - 1)
    step = max(1, _PANEL // group)
    return min(
        int((bits[start : start + step] & magnitude).max(axis=1).min())
        for start in range(0, len(bits), step)
    )


def quantize(host: HostArray, inputs: Inputs | Prepared | None = None) -> Lut16:
    """Quantize [N, K] (bf16, f16 or f32); scales have the weight's own type.

    ModelFileError for a weight that is not finite, ValueError if 32 does not divide K.
    """
    group, prepared = group_for(GROUP, host.shape[1]), as_prepared(inputs)
    levels = table(levels_for(host, group, prepared))
    found = search(host, Grid.TABLE, group, prepared, levels)
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
