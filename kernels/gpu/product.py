"""Pieces of the linear kernels: 64 rows of a weight times at most 32 prepared activations.

A result is fp32 [64, BM]: rows of the weight times tokens, BM 8, 16 or 32. What a token's column
holds does not depend on BM or on the other tokens, bit for bit. K is cut into ``splits`` parts of
whole tiles; the last program to arrive sums their results in order, so sums do not depend on time.
"""

import triton
import triton.language as tl

from llmrun.kernels.gpu.words import (
    INTERPRETED,
    group_values,
    halved,
    halves_of,
    lut_pair,
    ones_like,
    w4_pair,
    w8_pair,
    woven,
)


@triton.jit
def multiplied(w, x, acc, PRECISION: tl.constexpr):
    """acc + w x, x in bf16, each product exact.

    ``PRECISION``: ``bf16`` or ``tf32``, which hold w; ``f32``: w in three pieces of 8 bits.
    """
    if INTERPRETED:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    elif PRECISION == "bf16":
        return tl.dot(w, x, acc)
    elif PRECISION == "tf32":
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="tf32")
    else:
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        acc = tl.dot((rest - middle.to(tl.float32)).to(tl.bfloat16), x, acc)
        acc = tl.dot(middle, x, acc)
        return tl.dot(high, x, acc)


@triton.jit
def column_sums(words, x, sums):
    """sums [32, BM] plus the sums of x [columns, BM] over its columns, in every row.

    Ones times x, so the result lies as the products it is added to.
    """
    return multiplied(ones_like(words), x, sums, "bf16")


@triton.jit
def doubled(sums, BM: tl.constexpr):
    """[32, BM] twice, one after the other: [64, BM]."""
    return tl.reshape(tl.permute(tl.join(sums, sums), (2, 0, 1)), (64, BM))


@triton.jit
def activations(u, rows, mask, stride, first):
    """Columns ``first .. first + 127`` of some rows of u, as four [32, BM]."""
    k = tl.arange(0, 32)
    at = u + first + rows[None, :] * stride + k[:, None]
    return (
        tl.load(at, mask=mask[None, :], other=0.0),
        tl.load(at + 32, mask=mask[None, :], other=0.0),
        tl.load(at + 64, mask=mask[None, :], other=0.0),
        tl.load(at + 96, mask=mask[None, :], other=0.0),
    )


@triton.jit
def tile_words(codes, tile, FORM: tl.constexpr):
    """The words of a tile: [64, 16], or two of them for ``w8``."""
    n = tl.arange(0, 64)
    i = tl.arange(0, 16)
    if FORM == "w8":
        at = codes + tile * 2048 + n[:, None] * 32 + i[None, :]
        return tl.load(at), tl.load(at + 16)
    words = tl.load(codes + tile * 1024 + n[:, None] * 16 + i[None, :])
    return words, words


@triton.jit
def decoded(words, table, FORM: tl.constexpr, MINS: tl.constexpr, J: tl.constexpr):
    """Columns 32 J .. 32 J + 31 of a tile's words, or of the given ones of each row.

    The numbers are around zero except w4 beside minima, which count from zero.
    """
    if FORM == "w4":
        left, right = w4_pair(words, J, 0 if MINS else 8)
    elif FORM == "w8":
        left, right = w8_pair(words, J % 2)
    else:
        left, right = lut_pair(words, table, J)
    return woven(left, right)


@triton.jit
def minimum(low, scale, FORM: tl.constexpr):
    """What a code of number zero stands for, see ``decoded``."""
    return low + 128.0 * scale if FORM == "w8" else low


@triton.jit
def group_column(packed, tile, FIRST: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr):
    """Scales or minima [64] of one group of a tile; ``FIRST``: a column of the group."""
    COUNT: tl.constexpr = 128 // GROUP
    return group_values(packed + (tile * COUNT + FIRST // GROUP) * 32, KIND)


@triton.jit
def tile_groups(packed, tile, GROUP: tl.constexpr, KIND: tl.constexpr):
    """Scales or minima of all groups of a tile, one [64] each."""
    columns = (group_column(packed, tile, 0, GROUP, KIND),)
    for first in tl.static_range(GROUP, 128, GROUP):
        more = group_column(packed, tile, first, GROUP, KIND)
        columns = columns + (more,)  # type: ignore[assignment]
    return columns


@triton.jit
def tile_added(
    acc,
    words,
    table,
    x,
    scales,
    mins,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    MINS: tl.constexpr,
    BM: tl.constexpr,
):
    """acc plus the product of one tile [64, 128] and x, four [32, BM]."""
    part = tl.zeros((64, BM), tl.float32)
    sums = tl.zeros((32, BM), tl.float32)
    for j in tl.static_range(4):
        if GROUP == 16:
            words_halves = halved(words[j // 2])
            x_halves = halves_of(x[j], BM)
            for half in tl.static_range(2):
                scale = scales[2 * j + half]
                part = tl.zeros((64, BM), tl.float32)
                w = decoded(words_halves[half], table, FORM, MINS, j)
                acc += scale[:, None] * multiplied(w, x_halves[half], part, "bf16")
                if MINS:
                    sums = tl.zeros((32, BM), tl.float32)
                    sums = column_sums(words_halves[half], x_halves[half], sums)
                    low = minimum(mins[2 * j + half], scale, FORM)
                    acc += low[:, None] * doubled(sums, BM)
        else:
            w = decoded(words[j // 2], table, FORM, MINS, j)
            part = multiplied(w, x[j], part, "bf16")
            if MINS:
                sums = column_sums(words[0], x[j], sums)
            if (32 * j + 32) % GROUP == 0:
                scale = scales[32 * j // GROUP]
                acc += scale[:, None] * part
                part = tl.zeros((64, BM), tl.float32)
                if MINS:
                    low = minimum(mins[32 * j // GROUP], scale, FORM)
                    acc += low[:, None] * doubled(sums, BM)
                    sums = tl.zeros((32, BM), tl.float32)
    return acc
