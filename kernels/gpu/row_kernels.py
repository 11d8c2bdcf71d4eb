"""Kernels of whole rows: norms, and activations prepared for the linear that reads them.

A program writes one block of one row. Where a norm's statistics are wanted, every program of a row
takes them anew from the whole row: that costs a few reads from the cache and no second launch.
"""

import triton
import triton.language as tl

from llmrun.kernels.gpu.arrays import TILE_N
from llmrun.kernels.gpu.endings import activated, gated
from llmrun.kernels.gpu.rounding import to_bf16

_PART = tl.constexpr(1024)  # columns read at a time for statistics
_TILE_N = tl.constexpr(TILE_N)


@triton.jit
def statistics(
    x: tl.tensor, eps: tl.tensor, K: tl.constexpr, CENTERED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Mean (0 unless centered) and ``1 / sqrt(mean((x - mean)^2) + eps)`` of the row at x."""
    columns = tl.arange(0, _PART)
    mean = 0.0
    if CENTERED:
        total = tl.zeros([_PART], tl.float32)
        for start in range(0, K, _PART):
            total += tl.load(x + start + columns, mask=start + columns < K, other=0.0)
        mean = tl.sum(total, axis=0) / K
    total = tl.zeros([_PART], tl.float32)
    for start in range(0, K, _PART):
        inside = start + columns < K
        part = tl.load(x + start + columns, mask=inside, other=0.0)
        part = tl.where(inside, part - mean, 0.0)
        total += part * part
    return mean, tl.rsqrt(tl.sum(total, axis=0) / K + eps)


@triton.jit
def finished(
    x: tl.tensor,
    columns: tl.tensor,
    gamma: tl.tensor,
    beta: tl.tensor,
    offset: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    CENTERED: tl.constexpr,
) -> tl.tensor:
    """The columns of norm(row at x), zero behind K."""
    inside = columns < K
    mean, factor = statistics(x, eps, K, CENTERED)
    value = tl.load(x + columns, mask=inside, other=0.0)
    scale = tl.load(gamma + columns, mask=inside, other=0.0) + offset
    value = (value - mean) * factor * scale
    if beta is not None:
        value += tl.load(beta + columns, mask=inside, other=0.0)
    return tl.where(inside, value, 0.0)


@triton.jit
def prepare_block(
    value: tl.tensor,
    columns: tl.tensor,
    row: tl.tensor,
    fold: tl.tensor,
    fold_offset: tl.tensor,
    u: tl.tensor,
    squares: tl.tensor,
    u_stride: tl.tensor,
    squares_stride: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a block (a multiple of TILE_N columns, zero behind K) of a row as ``Prepared``."""
    tiles = tl.sum(tl.reshape(value * value, [BLOCK // _TILE_N, _TILE_N]), axis=1)
    tile = tl.min(columns, axis=0) // _TILE_N + tl.arange(0, BLOCK // _TILE_N)
    tl.store(squares + row * squares_stride + tile, tiles, mask=tile * _TILE_N < K)
    inside = columns < K
    if fold is not None:
        value *= tl.load(fold + columns, mask=inside, other=0.0) + fold_offset
    tl.store(u + row * u_stride + columns, to_bf16(value), mask=inside)


@triton.jit
def prepare_kernel(
    x: tl.tensor,
    gamma: tl.tensor,
    beta: tl.tensor,
    offset: tl.tensor,
    eps: tl.tensor,
    u: tl.tensor,
    squares: tl.tensor,
    x_stride: tl.tensor,
    u_stride: tl.tensor,
    squares_stride: tl.tensor,
    K: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of a row of x as ``Prepared``; gamma None: without a norm."""
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x += row * x_stride
    fold = gamma
    if CENTERED:
        value = finished(x, columns, gamma, beta, offset, eps, K, True)
        fold = None
    else:
        value = tl.load(x + columns, mask=columns < K, other=0.0)
    prepare_block(value, columns, row, fold, offset, u, squares, u_stride, squares_stride, K, BLOCK)


@triton.jit
def norm_add_kernel(
    x: tl.tensor,
    gamma: tl.tensor,
    beta: tl.tensor,
    offset: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    h: tl.tensor,
    fold: tl.tensor,
    fold_offset: tl.tensor,
    u: tl.tensor,
    squares: tl.tensor,
    x_stride: tl.tensor,
    h_stride: tl.tensor,
    u_stride: tl.tensor,
    squares_stride: tl.tensor,
    K: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of a row of ``h += scale * norm(x)``, and as ``Prepared`` unless u is None."""
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    added = finished(x + row * x_stride, columns, gamma, beta, offset, eps, K, CENTERED)
    place = h + row.to(tl.int64) * h_stride + columns
    value = tl.load(place, mask=inside, other=0.0) + scale * added
    tl.store(place, value, mask=inside)
    if u is not None:
        prepare_block(
            value, columns, row, fold, fold_offset, u, squares, u_stride, squares_stride, K, BLOCK
        )


@triton.jit
def permute_kernel(
    u: tl.tensor,
    squares: tl.tensor,
    order: tl.tensor,
    u_out: tl.tensor,
    squares_out: tl.tensor,
    u_stride: tl.tensor,
    squares_stride: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of a row of ``u[order]``; the squares are copied."""
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    source = tl.load(order + columns, mask=inside, other=0)
    value = tl.load(u + row * u_stride + source, mask=inside, other=0.0)
    tl.store(u_out + row * u_stride + columns, value, mask=inside)
    tile = block * (BLOCK // _TILE_N) + tl.arange(0, BLOCK // _TILE_N)
    place = row * squares_stride + tile
    held = tile * _TILE_N < K
    tl.store(squares_out + place, tl.load(squares + place, mask=held, other=0.0), mask=held)


@triton.jit
def normed_kernel(
    x: tl.tensor,
    gamma: tl.tensor,
    beta: tl.tensor,
    offset: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    K: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of a row of norm(x), rounded to bf16; gamma None: of x."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x += row * x_stride
    if gamma is None:
        value = tl.load(x + columns, mask=columns < K, other=0.0)
    else:
        value = finished(x, columns, gamma, beta, offset, eps, K, CENTERED)
    tl.store(out + row * out_stride + columns, to_bf16(value), mask=columns < K)


@triton.jit
def gated_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    out_stride: tl.tensor,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of a row of the activated gate times up."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    value = tl.load(up + row * up_stride + columns, mask=inside, other=0.0)
    if gate is None:
        value = activated(value, ACTIVATION)
    else:
        opened = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
        value = gated(opened, value, ACTIVATION)
    if out.dtype.element_ty == tl.bfloat16:
        value = to_bf16(value)
    tl.store(out + row * out_stride + columns, value, mask=inside)
