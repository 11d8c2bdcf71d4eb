"""Ends of the linear kernels: the norm's factor, activations, what the next kernel reads, and the
best of some logits."""

import triton
import triton.language as tl

from llmrun.kernels.gpu.rounding import to_bf16
from llmrun.kernels.ops import CLAMP, CLAMP_SLOPE

_CLAMP = tl.constexpr(CLAMP)
_CLAMP_SLOPE = tl.constexpr(CLAMP_SLOPE)


@triton.jit
def norm_factor(squares, rows, stride, k, eps):
    """``rsqrt(sum(squares) / k + eps)`` of some rows [BM]; a row has ``stride`` entries."""
    total = tl.zeros((rows.shape[0], 32), tl.float32)
    for start in range(0, stride, 128):
        for part in tl.static_range(4):  # four loads are under way at a time
            at = start + 32 * part + tl.arange(0, 32)
            places = squares + rows[:, None] * stride + at[None, :]
            total += tl.load(places, mask=(at < stride)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(total, 1) / k + eps)


@triton.jit
def tanh(x):
    """Hyperbolic tangent; its error is that of one rounding of 1."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """``silu`` or ``gelu_tanh``."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """The activated gate times ``up``, as ``ops.ACTIVATIONS`` says."""
    if ACTIVATION == "swiglu_clamped":
        gate = tl.minimum(gate, _CLAMP)
        up = tl.minimum(tl.maximum(up, -_CLAMP), _CLAMP)
        return gate / (1.0 + tl.exp(-_CLAMP_SLOPE * gate)) * (up + 1.0)
    else:
        return activated(gate, ACTIVATION) * up


@triton.jit
def prepare_tile(onto, value, rows, mask, tile, n, n_rows, gamma, offset, FOLD: tl.constexpr):
    """Write 64 columns of activations, ``value`` [64, BM], as inputs of the next linear.

    ``onto``: pointers to u and squares of an ``arrays.Prepared`` with ``n_rows`` columns.
    """
    u, squares = onto
    stride = (n_rows + 127) // 128 * 128
    value = tl.where((n < n_rows)[:, None], value, 0.0)
    tl.store(squares + rows * ((n_rows + 63) // 64) + tile, tl.sum(value * value, 0), mask=mask)
    if FOLD:
        value *= (tl.load(gamma + n, mask=n < n_rows, other=0.0) + offset)[:, None]
    wanted = (n < n_rows)[:, None] & mask[None, :]
    tl.store(u + rows[None, :] * stride + n[:, None], to_bf16(value), mask=wanted)


@triton.jit
def best_of_tile(best, at, value, n, vocab, mask):
    """Write what is known of 64 logits, ``value`` [64, BM], at places [BM] of a ``linear.Best``.

    ``best``: its pointers. A place has an id below ``vocab`` even if no logit is finite.
    """
    values, sums, ids = best
    finite = tl.abs(value) < float("inf")
    inside = (n < vocab)[:, None]
    faults = tl.max(tl.where(inside & (finite == 0), 1, 0), 0)
    counted = inside & finite
    value = tl.where(counted, value, float("-inf"))
    largest = tl.max(value, 0)
    winners = tl.where(value == largest[None, :], n[:, None], 0x7FFFFFFF)
    # Where nothing is counted there is no largest: no NaN may come of it.
    total = tl.sum(tl.where(counted, tl.exp(value - largest[None, :]), 0.0), 0)
    tl.store(ids + at, tl.min(winners, 0), mask=mask)
    tl.store(sums + at, total, mask=mask)
    tl.store(values + at, tl.where(faults > 0, float("nan"), largest), mask=mask)
