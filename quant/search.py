"""The search for scales: the arithmetic behind ``int4``, ``int4-asym``, ``nl4`` and weighted int8.

Per group of weights along K, in fp32. Candidates for the scale are multiples ``FACTORS`` of a start
that uses the whole grid, rounded to the weights' type; each is judged by ``sum a (w - v)^2`` over
the nearest values v of the grid, where a is the importance of the column (E[x^2], 1 where nothing
is known of the inputs); the first smallest wins. From there some steps try the scale that is best
for the values the last one gave (least squares). The order of every sum is part of the definition,
and no product is fused with a sum: the library and torch (``quant.search_reference``, where there
is no library) give the same bytes.
"""

from dataclasses import dataclass
from enum import Enum

from llmrun.kernels.cpu import quantize as native
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.blocks import not_finite
from llmrun.quant.compensation import NOTHING, Prepared
from llmrun.quant.inputs import WIDEST_BLOCK

FACTORS = tuple(percent / 100 for percent in range(70, 111, 2))
"""Candidates for the scale, as multiples of the start, in the order they are tried."""


class Grid(Enum):
    """What a code u stands for with a scale s; the start of the search in each case."""

    INT4 = native.INT4
    """s (u - 8). Start: the weight of largest magnitude, the first of equals, on code 0 (-8); with
    two ends on code 15 (7) too."""
    INT4_ZERO = native.INT4_ZERO
    """s (u - z), z = 0..15. Start: the range of the weights and 0 over 15 steps. For each scale,
    the two zero points next to the one that centres the range."""
    TABLE = native.TABLE
    """s table[u], ascending. Start: as INT4, on the first entry and on the last. A number in the
    very middle of two entries goes to the lower one."""
    INT8 = native.INT8
    """s (u - 128), |u - 128| <= 127. No search: s = absmax / 127."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self is Grid.INT8 else 4


@dataclass(frozen=True)
class Effort:
    """How a grid is searched: with how many ``ends`` and least-squares ``refits``."""

    ends: int
    refits: int


_UNWEIGHED = {
    Grid.INT4: Effort(1, 0),
    Grid.INT4_ZERO: Effort(1, 2),
    Grid.TABLE: Effort(2, 1),
    Grid.INT8: Effort(1, 0),
}
_WEIGHED = {
    Grid.INT4: Effort(2, 2),
    Grid.INT4_ZERO: Effort(1, 2),
    Grid.TABLE: Effort(2, 1),
    Grid.INT8: Effort(1, 0),
}


def effort(grid: Grid, inputs: Prepared) -> Effort:
    """What gave the least KL divergence on small models, with these inputs.

    SmolLM2-135M, int4 with importance: .208 with one end, .173 with both and two refits. Functions
    of the weight beside the importance made it worse: .223 with sqrt(mean w^2 + w^2); without
    importance .417 with w^2 against .366 (Gemma-3-270M .317 and .293).
    """
    return (_UNWEIGHED if inputs.importance is None else _WEIGHED)[grid]


@dataclass(frozen=True, eq=False)
class Searched:
    """``codes`` as in GroupInt; ``scales`` [N, K/group] of the weights' type, never zero;
    ``zeros`` U8 [N, K/group] for INT4_ZERO, else None."""

    codes: HostArray
    scales: HostArray
    zeros: HostArray | None


def results(host: HostArray, grid: Grid, group: int) -> Searched:
    """Arrays for the result of a search over a weight [N, K], all zero."""
    n, k = host.shape
    return Searched(
        empty(DType.U8, (n, k * grid.bits // 8)),
        empty(host.dtype, (n, k // group)),
        empty(DType.U8, (n, k // group)) if grid is Grid.INT4_ZERO else None,
    )


def search(
    host: HostArray,
    grid: Grid,
    group: int,
    inputs: Prepared = NOTHING,
    table: HostArray | None = None,
) -> Searched:
    """Quantize [N, K] (bf16, f16 or f32), ``group`` 32, 64 or 128 and a divisor of K.

    ``table``: F32 [16], ascending, for TABLE. ValueError for inputs of another width;
    ModelFileError for a weight that is not finite.
    """
    expect_width(inputs, host.shape[1], group)
    if problem() is not None:
        from llmrun.quant import search_reference

        return search_reference.search(host, grid, group, inputs, table)
    found = results(host, grid, group)
    how = effort(grid, inputs)
    bad = native.search(
        host,
        found.codes,
        found.scales,
        found.zeros,
        grid=grid.value,
        group=group,
        ends=how.ends,
        refits=how.refits,
        importance=inputs.importance,
        table=table,
        factors=inputs.factors,
    )
    if bad is not None:
        raise not_finite(host, bad)
    return found


def expect_width(inputs: Prepared, k: int, group: int) -> None:
    """ValueError unless the inputs are those of a linear with K columns, in whole groups.

    The native search has memory for blocks of at most ``WIDEST_BLOCK`` columns.
    """
    widths = [factor.shape[0] for factor in inputs.factors]
    if inputs.importance is not None and inputs.importance.shape != (k,):
        raise ValueError(f"importance of {inputs.importance.shape} inputs for {k} columns")
    odd = any(width % group or width > WIDEST_BLOCK for width in widths)
    if widths and (sum(widths) != k or odd):
        raise ValueError(
            f"second moments in blocks of {widths} for {k} columns in groups of {group}"
        )
