"""The kernel that norms and rotates queries and keys and appends keys and values to the cache."""

import triton
import triton.language as tl

from llmrun.kernels.gpu.cache import write_tokens


@triton.jit
def cosine_and_sine(angle: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Cosine and sine of fp32 angles below 2^30, to the last bits of fp32.

    The hardware's own are good to some 2^-20 near zero and to nothing for large angles, and a
    position is one: so multiples of pi / 2 are taken off in fp64.
    """
    wide = angle.to(tl.float64)
    turns = tl.floor(wide * 0.6366197723675814 + 0.5)
    x = (wide - turns * 1.5707963267948966).to(tl.float32)
    quarter = turns.to(tl.int32) & 3
    z = x * x
    sine = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    cosine = 4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5)
    cosine = 1.0 - 0.5 * z + z * z * cosine
    odd = (quarter & 1) == 1
    across = tl.where(odd, sine, cosine)
    along = tl.where(odd, cosine, sine)
    across = tl.where((quarter == 1) | (quarter == 2), -across, across)
    return across, tl.where(quarter >= 2, -along, along)


@triton.jit
def _turned(
    x: tl.tensor,
    head: tl.tensor,
    held: tl.tensor,
    gamma: tl.tensor,
    offset: tl.tensor,
    eps: tl.tensor,
    position: tl.tensor,
    frequencies: tl.tensor,
    attention_factor: tl.tensor,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """Heads number ``head`` at pointers x [HEADS, 1], normed and rotated: [HEADS, D_PAD], zero
    behind D. ``SIZE``: of how much a norm's mean is taken, D head by head, more of all together.
    """
    columns = tl.arange(0, D_PAD)[None, :]
    inside = held[:, None] & (columns < D)
    value = tl.load(x + columns, mask=inside, other=0.0)
    if gamma is not None:
        squares = tl.sum(value * value, axis=1)
        if SIZE != D:
            gamma += head[:, None] * D
            squares = tl.zeros_like(squares) + tl.sum(squares, axis=0)
        factor = tl.rsqrt(squares / SIZE + eps)[:, None]
        value *= factor * (tl.load(gamma + columns, mask=inside, other=0.0) + offset)
    if HALF > 0:
        left, rotated = columns < HALF, columns < 2 * HALF
        partner = tl.where(left, columns + HALF, columns - HALF)
        paired = held[:, None] & rotated
        other = tl.load(x + partner, mask=paired, other=0.0)
        if gamma is not None:
            other *= factor * (tl.load(gamma + partner, mask=paired, other=0.0) + offset)
        pair = tl.where(left, columns, columns - HALF)
        frequency = tl.load(frequencies + pair, mask=rotated, other=0.0)
        cosine, sine = cosine_and_sine(position.to(tl.float32) * frequency)
        turned = value * cosine + tl.where(left, -other, other) * sine
        value = tl.where(rotated, turned * attention_factor, value)
    return value


@triton.jit(do_not_specialize=["capacity"])
def rope_kernel(
    y: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    frequencies: tl.tensor,
    q_gamma: tl.tensor,
    q_offset: tl.tensor,
    q_eps: tl.tensor,
    k_gamma: tl.tensor,
    k_offset: tl.tensor,
    k_eps: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    attention_factor: tl.tensor,
    capacity: tl.tensor,
    y_stride: tl.tensor,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    Q_WHOLE: tl.constexpr,
    K_WHOLE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
) -> None:
    """One head of one token, or, where a norm is over all of them, its queries, keys or values.

    Q_HEADS and K_HEADS (of keys and of values) are powers of two. Rows without a slot, and
    positions behind the cache, are left alone.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    if (slot < 0) | (position >= capacity):
        return
    first = part
    if Q_WHOLE or K_WHOLE:
        first = tl.where(part == 0, 0, tl.where(part == 1, H, H + HKV))
    y += row.to(tl.int64) * y_stride
    columns = tl.arange(0, D_PAD)[None, :]
    if first < H:
        q_head = first + tl.arange(0, Q_HEADS)
        q_place = y + q_head[:, None] * D
        query = _turned(
            q_place, q_head, q_head < H, q_gamma, q_offset, q_eps, position, frequencies,
            attention_factor, H * D if Q_WHOLE else D, D, D_PAD, HALF,
        )  # fmt: skip
        tl.debug_barrier()  # every thread has read its pair before one of them is overwritten
        tl.store(q_place + columns, query, mask=(q_head < H)[:, None] & (columns < D))
    elif first < H + HKV:
        head = first - H + tl.arange(0, K_HEADS)
        place, held = y + (H + head)[:, None] * D, head < HKV
        value = _turned(
            place, head, held, k_gamma, k_offset, k_eps, position, frequencies,
            attention_factor, HKV * D if K_WHOLE else D, D, D_PAD, HALF,
        )  # fmt: skip
        tl.debug_barrier()
        tl.store(place + columns, value, mask=held[:, None] & (columns < D))
        token = (slot * HKV + head) * capacity + position
        write_tokens(value, held, keys, key_scales, token, D, D_PAD, SCALED)
    else:
        head = first - H - HKV + tl.arange(0, K_HEADS)
        place, held = y + (H + HKV + head)[:, None] * D, head < HKV
        value = tl.load(place + columns, mask=held[:, None] & (columns < D), other=0.0)
        token = (slot * HKV + head) * capacity + position
        write_tokens(value, held, values, value_scales, token, D, D_PAD, SCALED)
