"""Rotation, cache append and attention: what is launched, and how it is cut into programs.

Decode steps (``attend_few``) split the context among programs; how depends on a row's own length,
the model and the capacity of the cache, so a row's bits do not depend on its neighbours.
Prefill (``attend_many``) goes through torch's attention where that can express it, and through a
kernel of our own where it can not: a cached prefix, a window, a soft-cap, sinks, other caches than
f16.
"""

import functools
from collections.abc import Sequence

import torch
import triton
from torch.nn import attention as torch_attention
from torch.nn import functional

from llmrun.kernels.gpu.arrays import GpuKvLayer, Prepared, Workspace
from llmrun.kernels.gpu.attention_kernels import few_kernel, many_kernel
from llmrun.kernels.gpu.attention_shapes import (
    FEW_STAGES,
    MANY_STAGES,
    few_constants,
    head_constants,
    many_shape,
    query_scale,
    scaled,
    splits_of,
)
from llmrun.kernels.gpu.rope_kernel import rope_kernel
from llmrun.kernels.ops import Attention, Heads, Norm, Rope, Span

DTYPES = {"f16": torch.float16, "f32": torch.float32, "int8": torch.int8}  # of ops.KV_FORMS

CUDNN_FROM = 4096
"""Tokens from which cuDNN's faster attention is worth the plan it makes for each new length."""


def kv_layer(
    n_slots: int, capacity: int, heads: Heads, form: str, device: torch.device
) -> GpuKvLayer:
    """Reserve cache memory of ``capacity`` tokens for each slot; form as in ``ops.KV_FORMS``."""
    shape = (n_slots, heads.n_kv_heads, capacity, heads.head_dim)
    keys, values = (torch.empty(shape, dtype=DTYPES[form], device=device) for _ in range(2))
    if form != "int8":
        return GpuKvLayer(keys, values, None, None, heads)
    groups = heads.head_dim // scaled(heads.head_dim)
    key_scales, value_scales = (
        torch.empty(*shape[:3], groups, dtype=torch.float16, device=device) for _ in range(2)
    )
    return GpuKvLayer(keys, values, key_scales, value_scales, heads)


def kv_copy(layer: GpuKvLayer, source: int, target: int, n_tokens: int) -> None:
    """Copy the first ``n_tokens`` of slot ``source`` to slot ``target``."""
    for part in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
        if part is not None:
            part[target, :, :n_tokens].copy_(part[source, :, :n_tokens])


def rope_append(
    y: torch.Tensor,
    heads: Heads,
    rope: Rope | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    n: int,
    kv: GpuKvLayer,
) -> None:
    """In the first n rows of y, fp32 [rows, (H + 2 Hkv) dh]: norm and rotate queries and keys in
    place; write keys and values to the cache at each row's position. Rows of slot -1 are skipped.
    """
    q_whole = q_norm is not None and q_norm.whole
    k_whole = k_norm is not None and k_norm.whole
    together = q_whole or k_whole
    parts = 3 if together else heads.n_heads + 2 * heads.n_kv_heads
    rope_kernel[n, parts](
        y,
        positions,
        slots,
        None if rope is None else _frequencies(rope, y.device),
        *_norm_arguments(q_norm),
        *_norm_arguments(k_norm),
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        1.0 if rope is None else rope.attention_factor,
        kv.keys.shape[2],
        y.stride(0),
        H=heads.n_heads,
        HKV=heads.n_kv_heads,
        HALF=0 if rope is None else len(rope.inv_freq),
        Q_WHOLE=q_whole,
        K_WHOLE=k_whole,
        Q_HEADS=triton.next_power_of_2(heads.n_heads) if together else 1,
        K_HEADS=triton.next_power_of_2(heads.n_kv_heads) if together else 1,
        **head_constants(heads),
        num_warps=8 if together else 1,
    )


def attend_few(
    y: torch.Tensor,
    attention: Attention,
    positions: torch.Tensor,
    slots: torch.Tensor,
    m: int,
    kv: GpuKvLayer,
    o: torch.Tensor,
    onto: Prepared,
    work: Workspace,
) -> None:
    """o[:m] = attention of the queries in y, fp32 [rows, (H + 2 Hkv) dh], each up to its position.

    ``onto`` takes o as input of a linear (squares excepted). Rows of slot -1 are skipped.
    """
    heads = attention.heads
    splits = splits_of(kv.keys.shape[2], attention, work)
    few_kernel[splits, heads.n_kv_heads, m](
        y,
        positions,
        slots,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        attention.sinks,
        o,
        onto.u,
        work.partials,
        work.counters,
        query_scale(attention),
        attention.softcap,
        attention.window,
        kv.keys.shape[2],
        y.stride(0),
        o.stride(0),
        onto.u.stride(0),
        **few_constants(kv, heads, splits),
        num_warps=4,
        num_stages=FEW_STAGES,
    )


def attend_many(
    y: torch.Tensor,
    attention: Attention,
    spans: Sequence[Span],
    kv: GpuKvLayer,
    o: torch.Tensor,
) -> None:
    """o = attention of the queries in y, fp32 [rows, (H + 2 Hkv) dh], span by span.

    All keys and values, those of the spans too, are read from the cache.
    """
    for span in spans:
        if _is_plain(attention, span, kv):
            _attend_plain(y, attention, span, kv, o)
        else:
            _attend_span(y, attention, span, kv, o)


def _is_plain(attention: Attention, span: Span, kv: GpuKvLayer) -> bool:
    narrow = attention.window is not None and attention.window < span.count
    special = narrow or attention.softcap is not None or attention.sinks is not None
    return span.position == 0 and kv.keys.dtype == torch.float16 and not special


def _attend_plain(
    y: torch.Tensor, attention: Attention, span: Span, kv: GpuKvLayer, o: torch.Tensor
) -> None:
    heads = attention.heads
    here = slice(span.start, span.start + span.count)
    width = heads.n_heads * heads.head_dim
    shape = (span.count, heads.n_heads, heads.head_dim)
    queries = y[here, :width].half().view(shape).transpose(0, 1)[None]
    keys, values = kv.keys[span.slot, None, :, : span.count], kv.values[span.slot, None]
    values = values[:, :, : span.count]

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=attention.scale, enable_gqa=True
        )

    if y.is_cuda:
        with torch_attention.sdpa_kernel(_preferred(span.count), set_priority=True):
            mixed = attend()
    else:
        mixed = attend()
    o[here].view(shape).copy_(mixed[0].transpose(0, 1))


def _preferred(count: int) -> list[torch_attention.SDPBackend]:
    backends = torch_attention.SDPBackend
    flash, cudnn = backends.FLASH_ATTENTION, backends.CUDNN_ATTENTION
    first = [cudnn, flash] if count >= CUDNN_FROM else [flash, cudnn]
    return [*first, backends.EFFICIENT_ATTENTION, backends.MATH]


def _attend_span(
    y: torch.Tensor, attention: Attention, span: Span, kv: GpuKvLayer, o: torch.Tensor
) -> None:
    heads = attention.heads
    tokens, block, warps = many_shape(kv)
    many_kernel[triton.cdiv(span.count, tokens), heads.n_heads](
        y[span.start :],
        kv.keys[span.slot],
        kv.values[span.slot],
        None if kv.key_scales is None else kv.key_scales[span.slot],
        None if kv.value_scales is None else kv.value_scales[span.slot],
        attention.sinks,
        o[span.start :],
        query_scale(attention),
        attention.softcap,
        attention.window,
        span.count,
        span.position,
        kv.keys.shape[2],
        y.stride(0),
        o.stride(0),
        G=heads.n_heads // heads.n_kv_heads,
        ROWS=tokens,
        BLOCK=block,
        **head_constants(heads),
        num_warps=warps,
        num_stages=MANY_STAGES,
    )


def _norm_arguments(norm: Norm | None) -> tuple[torch.Tensor | None, float, float]:
    return (None, 0.0, 0.0) if norm is None else (norm.gamma, norm.offset, norm.eps)


@functools.cache
def _frequencies(rope: Rope, device: torch.device) -> torch.Tensor:
    # Kept for good: recorded graphs point to it, and it is small.
    return torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
