"""The linear kernels of decode steps. One program: 64 rows of a weight, one part of its columns.

Their pieces: ``streams.run`` reads and multiplies, ``splits`` adds parts up, ``endings`` does what
is fused behind. Sizes are arguments, so one compiled kernel serves all layers of a form.
"""

import triton
import triton.language as tl

from llmrun.kernels.gpu.endings import (
    activated,
    best_of_tile,
    gated,
    norm_factor,
    prepare_tile,
    tanh,
)
from llmrun.kernels.gpu.splits import arrived, part_at, summed
from llmrun.kernels.gpu.streams import run


@triton.jit
def biased(value, bias, n, n_rows, BIAS: tl.constexpr):
    """value [64, BM] plus a bias of its rows, if there is one."""
    if BIAS:
        return value + tl.load(bias + n, mask=n < n_rows, other=0.0)[:, None]
    else:
        return value


@triton.jit(
    do_not_specialize=[
        "first_1", "first_2", "n_0", "n_1", "n_2", "norm_columns", "norm_k", "y_stride", "m",
        "splits",
    ],
    do_not_specialize_on_alignment=["bias_0", "bias_1", "bias_2", "y"],
)  # fmt: skip
def linears_kernel(
    codes_0, scales_0, mins_0, table_0, bias_0,
    codes_1, scales_1, mins_1, table_1, bias_1,
    codes_2, scales_2, mins_2, table_2, bias_2,
    first_1, first_2, n_0, n_1, n_2, k,
    u, squares, norm_columns, norm_k, eps,
    y, y_stride, m, splits, partials, counters,
    PARTS: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    MINS: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """y = factor * (W u) + b for up to three weights side by side; the program picks its own."""
    place = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    tile = place
    column = 0
    if PARTS > 1:
        if place >= first_1:
            codes_0, scales_0, mins_0, table_0, bias_0 = codes_1, scales_1, mins_1, table_1, bias_1
            tile = place - first_1
            column = n_0
            n_0 = n_1
    if PARTS > 2:
        if place >= first_2:
            codes_0, scales_0, mins_0, table_0, bias_0 = codes_2, scales_2, mins_2, table_2, bias_2
            tile = place - first_2
            column += n_1
            n_0 = n_2
    rows = tl.arange(0, BM)
    mask = rows < m
    weight = (codes_0, scales_0, mins_0, table_0)
    acc, _ = run(
        weight, weight, u, rows, mask, tile, n_0, k, split, splits,
        False, FORM, GROUP, SCALES, MINS, BM,
    )  # fmt: skip
    last = True
    if SPLIT:
        tl.store(part_at(partials, place * splits + split, BM), acc)
        last = arrived(counters, place, splits)
    if last:
        if SPLIT:
            acc = summed(partials, place * splits, 1, splits, BM)
            tl.store(counters + place, 0)
        if FACTOR:
            acc *= norm_factor(squares, rows, norm_columns, norm_k, eps)[None, :]
        n = tile * 64 + tl.arange(0, 64)
        acc = biased(acc, bias_0, n, n_0, BIAS)
        at = y + rows[None, :] * y_stride + (column + n)[:, None]
        tl.store(at, acc, mask=(n < n_0)[:, None] & mask[None, :])


@triton.jit(
    do_not_specialize=["n_rows", "h_stride", "m", "splits"],
    do_not_specialize_on_alignment=["bias", "h", "gamma"],
)
def add_kernel(
    codes, scales, mins, table, bias, n_rows, k, u, scale, h, h_stride, m,
    onto_u, onto_squares, gamma, offset, splits, partials, counters,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    BIAS: tl.constexpr, ONTO: tl.constexpr, FOLD: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """h += scale * (W u + b), and the new h as inputs of the next linear."""
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    rows = tl.arange(0, BM)
    mask = rows < m
    weight = (codes, scales, mins, table)
    acc, _ = run(
        weight, weight, u, rows, mask, tile, n_rows, k, split, splits,
        False, FORM, GROUP, SCALES, MINS, BM,
    )  # fmt: skip
    last = True
    if SPLIT:
        tl.store(part_at(partials, tile * splits + split, BM), acc)
        last = arrived(counters, tile, splits)
    if last:
        if SPLIT:
            acc = summed(partials, tile * splits, 1, splits, BM)
            tl.store(counters + tile, 0)
        n = tile * 64 + tl.arange(0, 64)
        acc = biased(acc, bias, n, n_rows, BIAS)
        at = h + rows[None, :] * h_stride + n[:, None]
        wanted = (n < n_rows)[:, None] & mask[None, :]
        acc = tl.load(at, mask=wanted, other=0.0) + scale * acc
        tl.store(at, acc, mask=wanted)
        if ONTO:
            onto = (onto_u, onto_squares)
            prepare_tile(onto, acc, rows, mask, tile, n, n_rows, gamma, offset, FOLD)


@triton.jit(
    do_not_specialize=["n_rows", "norm_columns", "norm_k", "a_stride", "m", "splits"],
    do_not_specialize_on_alignment=["gate_bias", "up_bias", "a"],
)
def gate_up_kernel(
    gate_codes, gate_scales, gate_mins, gate_table, gate_bias,
    up_codes, up_scales, up_mins, up_table, up_bias,
    n_rows, k, u, squares, norm_columns, norm_k, eps, a, a_stride, m,
    onto_u, onto_squares, splits, partials, counters,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, MINS: tl.constexpr, GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr,
    FACTOR: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """a = activation(gate) * up, and a as inputs of the next linear.

    ``GATE``: ``same`` (a weight like the other, read beside it), ``ready`` (its values stand in
    a) or ``none`` (a = activation(up)).
    """
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    rows = tl.arange(0, BM)
    mask = rows < m
    PAIR: tl.constexpr = GATE == "same"
    up, gate = run(
        (up_codes, up_scales, up_mins, up_table), (gate_codes, gate_scales, gate_mins, gate_table),
        u, rows, mask, tile, n_rows, k, split, splits, PAIR, FORM, GROUP, SCALES, MINS, BM,
    )  # fmt: skip
    last = True
    COUNT: tl.constexpr = 2 if PAIR else 1
    first = tile * splits * COUNT
    if SPLIT:
        tl.store(part_at(partials, first + split * COUNT, BM), up)
        if PAIR:
            tl.store(part_at(partials, first + split * COUNT + 1, BM), gate)
        last = arrived(counters, tile, splits)
    if last:
        if SPLIT:
            up = summed(partials, first, COUNT, splits, BM)
            if PAIR:
                gate = summed(partials, first + 1, COUNT, splits, BM)
            tl.store(counters + tile, 0)
        n = tile * 64 + tl.arange(0, 64)
        at = a + rows[None, :] * a_stride + n[:, None]
        wanted = (n < n_rows)[:, None] & mask[None, :]
        if FACTOR:
            factor = norm_factor(squares, rows, norm_columns, norm_k, eps)
            up *= factor[None, :]
            gate *= factor[None, :]
        up = biased(up, up_bias, n, n_rows, UP_BIAS)
        if GATE == "none":
            value = activated(up, ACTIVATION)
        else:
            if PAIR:
                gate = biased(gate, gate_bias, n, n_rows, GATE_BIAS)
            else:
                gate = tl.load(at, mask=wanted, other=0.0)
            value = gated(gate, up, ACTIVATION)
        tl.store(at, value, mask=wanted)
        onto = (onto_u, onto_squares)
        prepare_tile(onto, value, rows, mask, tile, n, n_rows, onto_squares, 0.0, False)


@triton.jit(
    do_not_specialize=[
        "n_rows", "norm_columns", "norm_k", "logits_stride", "n_wanted", "vocab", "splits",
    ],
    do_not_specialize_on_alignment=["bias", "logits", "wanted_rows"],
)  # fmt: skip
def head_kernel(
    codes, scales, mins, table, bias, n_rows, k, u, squares, norm_columns, norm_k, eps,
    wanted_rows, n_wanted, scale, softcap, logits, logits_stride,
    best_values, best_sums, best_ids, vocab, splits, partials, counters,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, MINS: tl.constexpr,
    BIAS: tl.constexpr, FACTOR: tl.constexpr, SOFTCAP: tl.constexpr, BEST: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """logits[r] = softcap((factor * (W u) + b) * scale) of row ``wanted_rows[r]`` of u.

    ``BEST``: also, of each 64, what ``linear.Best`` says of those below ``vocab``.
    """
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    r = tl.arange(0, BM)
    mask = r < n_wanted
    rows = tl.load(wanted_rows + r, mask=mask, other=0)
    weight = (codes, scales, mins, table)
    acc, _ = run(
        weight, weight, u, rows, mask, tile, n_rows, k, split, splits,
        False, FORM, GROUP, SCALES, MINS, BM,
    )  # fmt: skip
    last = True
    if SPLIT:
        tl.store(part_at(partials, tile * splits + split, BM), acc)
        last = arrived(counters, tile, splits)
    if last:
        if SPLIT:
            acc = summed(partials, tile * splits, 1, splits, BM)
            tl.store(counters + tile, 0)
        if FACTOR:
            acc *= norm_factor(squares, rows, norm_columns, norm_k, eps)[None, :]
        n = tile * 64 + tl.arange(0, 64)
        acc = biased(acc, bias, n, n_rows, BIAS) * scale
        if SOFTCAP:
            acc = softcap * tanh(acc / softcap)
        at = logits + r[None, :].to(tl.int64) * logits_stride + n[:, None]
        tl.store(at, acc, mask=(n < n_rows)[:, None] & mask[None, :])
        if BEST:
            best = (best_values, best_sums, best_ids)
            best_of_tile(best, r * ((n_rows + 63) // 64) + tile, acc, n, vocab, mask)
