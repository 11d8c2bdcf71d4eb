"""Attention kernels: of few tokens, split along the context, and of many.

Both look at the cache tile by tile with the same function. Scores are powers of two (log2 e is
folded into the queries), sums are fp32. Products are as wide as the cache: f16 for f16 and int8,
fp32 for f32.
"""

import triton
import triton.language as tl

from llmrun.kernels.gpu.cache import read_tokens
from llmrun.kernels.gpu.rounding import to_bf16
from llmrun.kernels.gpu.splits import arrived

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _look(
    queries: tl.tensor,
    last: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries [ROWS, D_PAD] over tokens start .. stop of one KV head, each up to its ``last``.

    Returns the highest score [ROWS], the sum of weights relative to it and the weighted values;
    -inf and zeros for a query that sees none of them.
    """
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D_PAD], tl.float32)
    for at in range(start, stop, BLOCK):
        tokens = at + tl.arange(0, BLOCK)
        inside = tokens < stop
        tile = read_tokens(keys, key_scales, tokens, inside, D, D_PAD, SCALED)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee")
        if softcap is not None:  # c tanh(s / c); the queries carry 2 / c
            scores = softcap * _LOG2_E * (2.0 * tl.sigmoid(scores) - 1.0)
        visible = inside[None, :] & (tokens[None, :] <= last[:, None])
        if window is not None:
            visible = visible & (tokens[None, :] > last[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        kept = tl.exp2(best - level)
        total = total * kept + tl.sum(weights, axis=1)
        tile = read_tokens(values, value_scales, tokens, inside, D, D_PAD, SCALED)
        mixed = tl.dot(
            weights.to(tile.dtype), tile, acc=mixed * kept[:, None], input_precision="ieee"
        )
        best = higher
    return best, total, mixed


@triton.jit
def _cut(
    first: tl.tensor,
    stop: tl.tensor,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Tokens of a part of ``first`` .. ``stop``, PART or more, and how many parts are not empty.

    There are SPLITS parts at most. At least one is in use, even of no tokens.
    """
    share = tl.maximum(tl.cdiv(tl.cdiv(stop - first, SPLITS), BLOCK) * BLOCK, PART)
    return share, tl.maximum(tl.cdiv(stop - first, share), 1)


@triton.jit
def _gathered(
    partials: tl.tensor,
    bests: tl.tensor,
    totals: tl.tensor,
    first: tl.tensor,
    used: tl.tensor,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What ``_look`` would have returned over all parts, from their results: ``used`` of them,
    numbers ``first`` on.

    CHUNK of them are on their way at a time: this is the last program, and everybody waits for it.
    They are read past the first-level cache, which may hold what was there before.
    """
    head, columns = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    part = tl.arange(0, SPLITS)[:, None]
    record = (first + part) * G + head[None, :]
    held = (head < G)[None, :] & (part < used)
    each = tl.load(bests + record, mask=held, other=0.0, cache_modifier=".cg")
    each = tl.where(part < used, each, float("-inf"))
    best = tl.max(each, axis=0)
    each = tl.exp2(each - best[None, :])
    each *= tl.load(totals + record, mask=held, other=0.0, cache_modifier=".cg")
    total = tl.sum(each, axis=0)
    mixed = tl.zeros([G_PAD, D_PAD], tl.float32)
    for start in range(0, used, CHUNK):
        some = start + tl.arange(0, CHUNK)[:, None]
        there = (head < G)[None, :] & (some < used)
        place = (first + some) * G + head[None, :]
        kept = tl.load(bests + place, mask=there, other=0.0, cache_modifier=".cg")
        kept = tl.where(there, tl.exp2(kept - best[None, :]), 0.0)
        values = partials + place[:, :, None] * D + columns[None, None, :]
        inside = there[:, :, None] & (columns < D)[None, None, :]
        tile = tl.load(values, mask=inside, other=0.0, cache_modifier=".cg")
        mixed += tl.sum(kept[:, :, None] * tile, axis=0)
    return best, total, mixed


@triton.jit
def _settled(
    best: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    sinks: tl.tensor,
    head: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """The weighted mean, after the sink of each row's ``head`` has taken its share; zero for a row
    that sees nothing."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=0.0) * _LOG2_E
        level = tl.maximum(best, sink)
        kept = tl.exp2(best - level)
        total = total * kept + tl.exp2(sink - level)
        mixed = mixed * kept[:, None]
    return mixed / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _write_few(
    result: tl.tensor,
    row: tl.tensor,
    first_head: tl.tensor,
    o: tl.tensor,
    u: tl.tensor,
    o_stride: tl.tensor,
    u_stride: tl.tensor,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Heads [ROWS, D_PAD] of a token to o and, rounded, to u."""
    head, columns = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    inside = (head < G)[:, None] & (columns < D)[None, :]
    place = (first_head + head)[:, None] * D + columns[None, :]
    tl.store(o + row * o_stride + place, result, mask=inside)
    tl.store(u + row * u_stride + place, to_bf16(result), mask=inside)


@triton.jit(do_not_specialize=["capacity"])
def few_kernel(
    y: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    sinks: tl.tensor,
    o: tl.tensor,
    u: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    capacity: tl.tensor,
    y_stride: tl.tensor,
    o_stride: tl.tensor,
    u_stride: tl.tensor,
    HKV: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """The G query heads of one KV head of one token, over one of SPLITS parts of what it sees.

    How many parts are in use follows from the token's own length; programs of the others return.
    Whoever is last to finish its part adds all of them up, in order.
    """
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    last = tl.load(positions + row)
    length = tl.minimum(last + 1, capacity)
    first = 0
    if window is not None:
        first = tl.maximum(last + 1 - window, 0)
    share, used = _cut(first, length, SPLITS, PART, BLOCK)
    if split >= used:
        return
    start = first + split * share
    stop = tl.minimum(start + share, length)

    head, columns = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    inside = (head < G)[:, None] & (columns < D)[None, :]
    place = (kv_head * G + head)[:, None] * D + columns[None, :]
    queries = tl.load(y + row * y_stride + place, mask=inside, other=0.0) * scale
    token = (slot.to(tl.int64) * HKV + kv_head) * capacity
    if key_scales is not None:
        key_scales += token * (D // SCALED)
        value_scales += token * (D // SCALED)
        queries = queries.to(tl.float16)
    else:
        queries = queries.to(keys.dtype.element_ty)
    best, total, mixed = _look(
        queries, tl.zeros([ROWS], tl.int32) + last,
        keys + token * D, values + token * D, key_scales, value_scales,
        start, stop, window, softcap, D, D_PAD, ROWS, BLOCK, SCALED,
    )  # fmt: skip
    if SPLITS > 1:
        if used > 1:
            # Partial sums: values of all parts, then the highest scores, then the sums of weights.
            group = row * HKV + kv_head
            records = tl.num_programs(2) * HKV * SPLITS * G
            bests = partials + records * D
            totals = bests + records
            record = (group * SPLITS + split) * G + head
            tl.store(partials + record[:, None] * D + columns[None, :], mixed, mask=inside)
            tl.store(bests + record, best, mask=head < G)
            tl.store(totals + record, total, mask=head < G)
            if arrived(counters, group, used):
                tl.store(counters + group, 0)
                own = tl.arange(0, G_PAD)
                all_best, all_total, all_mixed = _gathered(
                    partials, bests, totals, group * SPLITS, used,
                    G, G_PAD, D, D_PAD, SPLITS, CHUNK,
                )  # fmt: skip
                whole = _settled(all_best, all_total, all_mixed, sinks, kv_head * G + own, own < G)
                _write_few(whole, row, kv_head * G, o, u, o_stride, u_stride, G, D, D_PAD, G_PAD)
            return
    result = _settled(best, total, mixed, sinks, kv_head * G + head, head < G)
    _write_few(result, row, kv_head * G, o, u, o_stride, u_stride, G, D, D_PAD, ROWS)


@triton.jit(do_not_specialize=["count", "position", "capacity"])
def many_kernel(
    y: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    sinks: tl.tensor,
    o: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    count: tl.tensor,
    position: tl.tensor,
    capacity: tl.tensor,
    y_stride: tl.tensor,
    o_stride: tl.tensor,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """ROWS of ``count`` tokens from ``position`` on, one head; all pointers are the span's."""
    # The last rows see most and start first.
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, D_PAD)
    inside = (row < count)[:, None] & (columns < D)[None, :]
    place = row.to(tl.int64)[:, None] * y_stride + head * D + columns[None, :]
    queries = tl.load(y + place, mask=inside, other=0.0) * scale
    token = (head // G).to(tl.int64) * capacity
    if key_scales is not None:
        key_scales += token * (D // SCALED)
        value_scales += token * (D // SCALED)
        queries = queries.to(tl.float16)
    else:
        queries = queries.to(keys.dtype.element_ty)
    start = 0
    if window is not None:
        start = tl.maximum(position + block * ROWS + 1 - window, 0)
    stop = position + tl.minimum((block + 1) * ROWS, count)
    best, total, mixed = _look(
        queries, position + row, keys + token * D, values + token * D, key_scales, value_scales,
        start, stop, window, softcap, D, D_PAD, ROWS, BLOCK, SCALED,
    )  # fmt: skip
    result = _settled(best, total, mixed, sinks, head + tl.zeros_like(row), row < count)
    place = row.to(tl.int64)[:, None] * o_stride + head * D + columns[None, :]
    tl.store(o + place, result, mask=inside)
