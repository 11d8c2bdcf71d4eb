"""Sums of parts: several programs compute parts of one result, the last to arrive adds them up.

Parts are added in their order, whoever arrives when, so the same inputs give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def part_at(partials, part, BM: tl.constexpr):
    """Pointers [64, BM] to a part in the workspace."""
    n = tl.arange(0, 64)
    m = tl.arange(0, BM)
    return partials + part.to(tl.int64) * (64 * BM) + m[None, :] * 64 + n[:, None]


@triton.jit
def arrived(counters, place, splits):
    """Count this program in, after it has stored its part; true for the last of ``splits``."""
    tl.debug_barrier()  # all threads have stored before one of them tells
    return tl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu") == splits - 1


@triton.jit
def summed(partials, first, step, splits, BM: tl.constexpr):
    """Parts ``first``, ``first + step``, ... in order; four loads are under way at a time.

    They come from the L2 cache: other processors have written them.
    """
    total = tl.zeros((64, BM), tl.float32)
    for split in range(0, splits, 4):
        for next_one in tl.static_range(4):
            part = split + next_one
            at = part_at(partials, first + part * step, BM)
            total += tl.load(at, mask=part < splits, other=0.0, cache_modifier=".cg")
    return total
