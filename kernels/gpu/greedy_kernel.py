"""The kernel that chooses greedily from what the head found of each 64 logits (``linear.Best``).

It does for such rows what ``pick_kernels.choose`` does behind a ``scan`` of all logits.
"""

import triton
import triton.language as tl

from llmrun.kernels.gpu.pick_kernels import NUMBERS

_NUMBERS = tl.constexpr(NUMBERS)
_TILE = tl.constexpr(64)
_NOBODY = tl.constexpr(0x7FFFFFFF)  # behind every id


@triton.jit
def choose_best(
    values: tl.tensor,
    sums: tl.tensor,
    ids: tl.tensor,
    numbers: tl.tensor,
    result: tl.tensor,
    fed_ids: tl.tensor,
    fed_positions: tl.tensor,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """``result`` fp64 [2] of each row: the lowest id of the largest logit, -1 if a logit is not
    finite, and its logprob. The id goes to ``fed_ids``; position and draw count up."""
    row = tl.program_id(0)
    numbers += row * _NUMBERS
    vocab = tl.load(numbers + 3).to(tl.int32)
    if vocab == 0:
        return
    tiles = tl.arange(0, WIDTH)
    used = tiles * _TILE < vocab
    places = row * TILES + tiles
    largest = tl.load(values + places, mask=used, other=float("-inf"))
    candidates = tl.load(ids + places, mask=used, other=_NOBODY)
    totals = tl.load(sums + places, mask=used, other=0.0)
    finite = tl.abs(largest) < float("inf")
    bad = tl.max((used & (finite == 0)).to(tl.int32), 0)
    largest = tl.where(finite, largest, float("-inf"))
    most = tl.max(largest, 0)
    chosen = tl.min(tl.where(largest == most, candidates, _NOBODY), 0)
    total = tl.sum(tl.where(finite, totals * tl.exp(largest - most), 0.0), 0)
    tl.store(result + row * 2, tl.where(bad != 0, -1, chosen).to(tl.float64))
    tl.store(result + row * 2 + 1, -tl.log(total.to(tl.float64)))
    tl.store(fed_ids + row, chosen)
    tl.store(fed_positions + row, tl.load(fed_positions + row) + 1)
    tl.store(numbers + 1, tl.load(numbers + 1) + 1)
