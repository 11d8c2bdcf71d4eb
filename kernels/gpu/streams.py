"""The main loops of the linear kernels: a run of a weight's tiles, read once and multiplied.

Codes and activations come through the compiler's pipeline of asynchronous copies; scales are too
small for it and are loaded one turn ahead instead. One loop reads one weight, or two of the same
form and shape: the gate and the value of a gated activation, from the same activations.
"""

import triton
import triton.language as tl

from llmrun.kernels.gpu.product import activations, multiplied, tile_added, tile_groups, tile_words


@triton.jit
def moved(weight, tiles, FORM: tl.constexpr, GROUP: tl.constexpr):
    """Pointers (codes, scales, mins, table) of a packed weight, ``tiles`` tiles further on."""
    codes, scales, mins, table = weight
    groups = tiles * (32 * (128 // GROUP))
    return codes + tiles * (2048 if FORM == "w8" else 1024), scales + groups, mins + groups, table


@triton.jit
def groups_at(weight, tile, GROUP: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr):
    """Scales and minima of a tile's groups (scales twice where there are no minima)."""
    scales = tile_groups(weight[1], tile, GROUP, SCALES)
    if MINS:
        return scales, tile_groups(weight[2], tile, GROUP, "f32")
    else:
        return scales, scales


@triton.jit
def packed_run(
    one,
    two,
    u,
    rows,
    mask,
    tile_row,
    k_tiles,
    start,
    stop,
    PAIR: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    MINS: tl.constexpr,
    BM: tl.constexpr,
):
    """64 rows of a packed weight times u over K tiles ``start`` .. ``stop``: fp32 [64, BM], twice.

    ``one``: its pointers; ``two``: those of the second weight with ``PAIR``, else not read (the
    second result is the first). ``rows``, ``mask`` [BM]: rows of u, and which are wanted.
    """
    one = moved(one, tile_row.to(tl.int64) * k_tiles, FORM, GROUP)
    acc = tl.zeros((64, BM), tl.float32)
    groups = groups_at(one, start, GROUP, SCALES, MINS)
    if PAIR:
        two = moved(two, tile_row.to(tl.int64) * k_tiles, FORM, GROUP)
        acc_two = tl.zeros((64, BM), tl.float32)
        groups_two = groups_at(two, start, GROUP, SCALES, MINS)
    for tile in tl.range(start, stop):
        ahead = tl.minimum(tile + 1, stop - 1)
        x = activations(u, rows, mask, k_tiles * 128, tile * 128)
        words = tile_words(one[0], tile, FORM)
        following = groups_at(one, ahead, GROUP, SCALES, MINS)
        if PAIR:
            words_two = tile_words(two[0], tile, FORM)
            following_two = groups_at(two, ahead, GROUP, SCALES, MINS)
        acc = tile_added(acc, words, one[3], x, groups[0], groups[1], FORM, GROUP, MINS, BM)
        groups = following
        if PAIR:
            acc_two = tile_added(
                acc_two, words_two, two[3], x, groups_two[0], groups_two[1], FORM, GROUP, MINS, BM
            )
            groups_two = following_two
    return acc, acc_two if PAIR else acc


@triton.jit
def dense_block(w, n, n_rows, k, columns):
    """Rows n and some columns of a dense weight [N, K]; zero outside of it."""
    at = w + n.to(tl.int64)[:, None] * k + columns[None, :]
    return tl.load(at, mask=(n < n_rows)[:, None] & (columns < k)[None, :], other=0.0)


@triton.jit
def dense_run(
    one,
    two,
    u,
    rows,
    mask,
    tile_row,
    n_rows,
    k,
    start,
    stop,
    PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
):
    """``packed_run`` for dense weights [N, K]; ``one`` and ``two``: pointers to them."""
    BLOCK: tl.constexpr = 128 if PRECISION == "bf16" else 64 if PRECISION == "tf32" else 32
    stride = (k + 127) // 128 * 128
    n = tile_row * 64 + tl.arange(0, 64)
    inside = tl.arange(0, BLOCK)
    acc = tl.zeros((64, BM), tl.float32)
    if PAIR:
        acc_two = tl.zeros((64, BM), tl.float32)
    for first in tl.range(start * 128, stop * 128, BLOCK):
        columns = first + inside
        x = tl.load(u + rows[None, :] * stride + columns[:, None], mask=mask[None, :], other=0.0)
        acc = multiplied(dense_block(one, n, n_rows, k, columns), x, acc, PRECISION)
        if PAIR:
            acc_two = multiplied(dense_block(two, n, n_rows, k, columns), x, acc_two, PRECISION)
    return acc, acc_two if PAIR else acc


@triton.jit
def run(
    one,
    two,
    u,
    rows,
    mask,
    tile_row,
    n_rows,
    k,
    split,
    splits,
    PAIR: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    MINS: tl.constexpr,
    BM: tl.constexpr,
):
    """Part ``split`` of 64 rows of a weight in any form times u: fp32 [64, BM], for two weights.

    ``one``, ``two``: pointers (codes, scales, mins, table). ``SCALES``: bf16, f16 or f32; of a
    dense weight the precision of its product.
    """
    k_tiles = (k + 127) // 128
    start = split * k_tiles // splits
    stop = (split + 1) * k_tiles // splits
    if FORM == "dense":
        return dense_run(
            one[0], two[0], u, rows, mask, tile_row, n_rows, k, start, stop, PAIR, SCALES, BM
        )
    else:
        return packed_run(
            one, two, u, rows, mask, tile_row, k_tiles, start, stop,
            PAIR, FORM, GROUP, SCALES, MINS, BM,
        )  # fmt: skip
