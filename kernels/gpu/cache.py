"""How kernels write to the KV cache of a layer and read from it.

Form int8 holds codes ``c = round(x / s)``, cut to +-127, with ``s = f16(max|x| / 127)`` of
64 values that follow each other in a head, or of the whole head where its size is no multiple of
64. All arithmetic on the way is fp32, divisions are exact to the last bit.
"""

import triton
import triton.language as tl

from llmrun.kernels.gpu.rounding import nearest_integer


@triton.jit
def write_tokens(
    x: tl.tensor,
    held: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    tokens: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Store x, fp32 [L, D_PAD] and zero behind D, as tokens int64 [L] of the cache if ``held``."""
    columns = tl.arange(0, D_PAD)
    if scales is not None:
        # Padding is zero and changes no maximum.
        WIDTH: tl.constexpr = SCALED if D % SCALED == 0 and D != SCALED else D_PAD
        GROUPS: tl.constexpr = D_PAD // WIDTH
        parts = tl.reshape(x, [x.shape[0], GROUPS, WIDTH])
        scale = tl.div_rn(tl.max(tl.abs(parts), axis=2), 127.0).to(tl.float16)
        group = tl.arange(0, GROUPS)
        tl.store(
            scales + tokens[:, None] * (D // SCALED) + group[None, :],
            scale,
            mask=held[:, None] & (group * SCALED < D)[None, :],
        )
        divisor = tl.where(scale > 0, scale.to(tl.float32), float("inf"))
        codes = nearest_integer(tl.div_rn(parts, divisor[:, :, None]))
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
        x = tl.reshape(codes, x.shape)
    place = cache + tokens[:, None] * D + columns[None, :]
    tl.store(place, x.to(cache.dtype.element_ty), mask=held[:, None] & (columns < D)[None, :])


@triton.jit
def read_tokens(
    cache: tl.tensor,
    scales: tl.tensor,
    tokens: tl.tensor,
    inside: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SCALED: tl.constexpr,
) -> tl.tensor:
    """Tokens [L] of the cache as f16 or f32 [L, D_PAD], zero outside: what is stored there may be
    no number at all."""
    columns = tl.arange(0, D_PAD)
    held = inside[:, None] & (columns < D)[None, :]
    tile = tl.load(cache + tokens[:, None] * D + columns[None, :], mask=held, other=0)
    if scales is not None:
        WIDTH: tl.constexpr = SCALED if D % SCALED == 0 and D != SCALED else D_PAD
        GROUPS: tl.constexpr = D_PAD // WIDTH
        group = tl.arange(0, GROUPS)
        scale = tl.load(
            scales + tokens[:, None] * (D // SCALED) + group[None, :],
            mask=inside[:, None] & (group * SCALED < D)[None, :],
            other=0.0,
        )
        parts = tl.reshape(tile.to(tl.float16), [tokens.shape[0], GROUPS, WIDTH])
        tile = tl.reshape(parts * scale[:, :, None], [tokens.shape[0], D_PAD])
    return tile
