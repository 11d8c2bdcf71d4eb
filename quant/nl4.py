"""Scheme ``nl4``: a table of 16 signed 8-bit levels fitted to each weight, signed searched scales.

Levels are whole numbers in -127..127, the first is -127, and one is 0, so that zeros stay zeros.
Fitting starts from the levels of GGUF's IQ4_NL and takes turns, over a sample of whole rows:
``quant.search`` picks scales and codes for the levels, then each level becomes the weighted mean
of what its code has to stand for. Sums run in fp64 in the order of the weights, so the same weight
gives the same levels on every machine.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmrun.kernels.forms import Lut16
from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.arrays import floats, nibbles, unsigned
from llmrun.quant.compensation import NOTHING, Prepared, as_prepared
from llmrun.quant.inputs import Inputs
from llmrun.quant.scheme import Scheme, group_for
from llmrun.quant.search import Grid, Searched, search

if TYPE_CHECKING:
    import numpy as np

GROUP = 32

START = (-127, -104, -83, -65, -49, -35, -22, -10, 0, 13, 25, 38, 53, 69, 89, 113)
"""IQ4_NL's levels, but for its 1, which is 0 here."""

ZERO = 8
"""Code of the level that is 0."""

TURNS = 4
SAMPLE_WEIGHTS = 1 << 18
"""Weights a table is fitted to, about: each level sees thousands of them."""

REASON_UNPUBLISHABLE = (
    "no checkpoint format that other engines load holds a table of levels; "
    "the result is kept in llmrun's own store and loads with llmrun"
)


def quantize(host: HostArray, inputs: Inputs | Prepared | None = None) -> Lut16:
    """Quantize [N, K] (bf16, f16 or f32); scales have the weight's own type.

    ModelFileError for a weight that is not finite, ValueError if 32 does not divide K.
    """
    group = group_for(GROUP, host.shape[1])
    prepared = as_prepared(inputs)
    table = fitted_table(host, group, prepared.importance)
    found = search(host, Grid.TABLE, group, prepared, table)
    return Lut16(group, found.codes, table, found.scales, (host.shape[0], host.shape[1]))


def fitted_table(host: HostArray, group: int, importance: HostArray | None) -> HostArray:
    """Return the levels F32 [16] that suit a weight [N, K], ascending whole numbers."""
    sample = _sample(host)
    prepared = NOTHING if importance is None else Prepared(importance)
    table = _table(START)
    for _ in range(TURNS):
        found = search(sample, Grid.TABLE, group, prepared, table)
        refitted = _refitted(sample, group, importance, found, table)
        if floats(refitted).tolist() == floats(table).tolist():
            break
        table = refitted
    return table


def _sample(host: HostArray) -> HostArray:
    """Whole rows, spread evenly over the weight, of together about SAMPLE_WEIGHTS."""
    n, k = host.shape
    rows = min(n, max(1, SAMPLE_WEIGHTS // k))
    if rows == n:
        return host
    source = unsigned(host)
    sample = empty(host.dtype, (rows, k))
    unsigned(sample)[...] = source[[row * n // rows for row in range(rows)]]
    return sample


def _refitted(
    sample: HostArray, group: int, importance: HostArray | None, found: Searched, table: HostArray
) -> HostArray:
    """The levels that stand best for what they were chosen for; those of unused codes stay."""
    import numpy as np

    codes = nibbles(unsigned(found.codes)).reshape(-1)
    weights = floats(sample).reshape(-1, group).astype(np.float64)
    scales = floats(found.scales).reshape(-1, 1).astype(np.float64)
    errors = _importance(weights, importance, group)
    # In units of a group's scale, error a (w - s t)^2 = a s^2 (w / s - t)^2.
    above = np.bincount(codes, (errors * scales * weights).reshape(-1), 16)
    below = np.bincount(codes, (errors * scales * scales).reshape(-1), 16)
    levels = floats(table).astype(np.float64)
    np.divide(above, below, out=levels, where=below > 0)
    levels[ZERO] = 0
    levels *= -127 / levels[0]
    rounded = np.clip(np.rint(levels), -127, 127)
    if (np.diff(rounded) <= 0).any():  # two levels in one: nothing is won by fewer
        return table
    return _table(rounded.tolist())


def _importance(
    weights: "np.ndarray", importance: HostArray | None, group: int
) -> "np.ndarray":
    """The same as ``quant.weighting``, in fp64, of groups [B, group]."""
    import numpy as np

    squares = weights * weights
    if importance is None:
        return squares
    total = np.zeros(len(weights))
    for column in squares.T:  # one after another: numpy's own sums depend on the processor
        total += column
    columns = floats(importance).reshape(-1, group)
    h = np.tile(columns, (len(weights) // len(columns), 1))
    return h * np.sqrt(total[:, None] / group + squares)


def _table(levels: Sequence[float]) -> HostArray:
    table = empty(DType.F32, (16,))
    floats(table)[...] = levels
    return table


def bits_per_weight(shape: tuple[int, int], dtype: DType = DType.BF16) -> float:
    """Bits per weight for [N, K] of ``dtype``, the table of 64 bytes included: 4.5 and a little."""
    n, k = shape
    return 4 + dtype.bits / group_for(GROUP, k) + 512 / (n * k)


SCHEME = Scheme(
    name="nl4",
    summary="4-bit codes into 16 levels fitted to the weight, searched scale per 32 weights",
    family="lut4",
    group=GROUP,
    publishable=False,
    weighted=True,
    reason_unpublishable=REASON_UNPUBLISHABLE,
    quantize=quantize,
    bits_per_weight=bits_per_weight,
)
