"""Rotation, cache append and attention of the reference backend, in fp32."""

import torch

from llmrun.kernels.ops import Attention, Heads, Norm, Rope, Span
from llmrun.kernels.reference.norms import normed
from llmrun.kernels.reference.step import TorchKvLayer, TorchStep

SCORES = 1 << 24
"""Attention scores computed at a time (64 MiB)."""


def rope_append(
    step: TorchStep,
    y: torch.Tensor,
    heads: Heads,
    rope: Rope | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    kv: TorchKvLayer,
) -> None:
    """Norm and rotate queries and keys in place; append keys and values to the cache."""
    queries, keys, values = split_heads(y, step.n_tokens, heads)
    for part, norm in ((queries, q_norm), (keys, k_norm)):
        if norm is not None:
            rows = part.flatten(1) if norm.whole else part
            part.copy_(normed(rows, norm).view(part.shape))
        if rope is not None:
            _rotate(part, *step.rotation(rope))
    for span in step.spans:
        here = slice(span.start, span.start + span.count)
        there = slice(span.position, span.position + span.count)
        kv.write(span.slot, there, keys[here], values[here])


def attend(
    step: TorchStep, y: torch.Tensor, attention: Attention, kv: TorchKvLayer, o: torch.Tensor
) -> None:
    """Causal softmax attention of every span over its slot, query heads grouped by KV head."""
    queries, _, _ = split_heads(y, step.n_tokens, attention.heads)
    for span in step.spans:
        # Queries in blocks, so that scores stay within a bound whatever the context.
        block = max(1, SCORES // (attention.heads.n_heads * (span.position + span.count)))
        for done in range(0, span.count, block):
            count = min(block, span.count - done)
            part = Span(span.slot, span.start + done, count, span.position + done)
            _attend_span(queries, part, attention, kv, o)


def _attend_span(
    queries: torch.Tensor, span: Span, attention: Attention, kv: TorchKvLayer, o: torch.Tensor
) -> None:
    heads = attention.heads
    per_kv = heads.n_heads // heads.n_kv_heads
    rows = slice(span.start, span.start + span.count)
    length = span.position + span.count
    # A window lets every query see its own token and the window - 1 before it, so keys
    # before the first query's window are never read.
    first = 0 if attention.window is None else max(0, span.position + 1 - attention.window)
    keys, values = kv.read(span.slot, slice(first, length))  # (Hkv, L, dh)
    grouped = queries[rows].view(span.count, heads.n_kv_heads, per_kv, heads.head_dim)
    grouped = grouped.permute(1, 2, 0, 3).reshape(heads.n_kv_heads, -1, heads.head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).mul_(attention.scale)
    scores = scores.view(heads.n_heads, span.count, -1)
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    if span.count > 1 or attention.window is not None:
        scores.masked_fill_(
            _hidden(span.position, span.count, first, length, attention, scores.device),
            float("-inf"),
        )
    weights = _softmax(scores, attention.sinks)
    weights = weights.view(heads.n_kv_heads, per_kv * span.count, -1)
    mixed = torch.bmm(weights, values).view(heads.n_heads, span.count, heads.head_dim)
    o[rows].view(span.count, heads.n_heads, heads.head_dim).copy_(mixed.transpose(0, 1))


def split_heads(
    y: torch.Tensor, n_tokens: int, heads: Heads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View y[T, (H + 2 Hkv) dh] as queries [T, H, dh], keys and values [T, Hkv, dh]."""
    parts = y[:n_tokens].view(n_tokens, -1, heads.head_dim)
    first_value = heads.n_heads + heads.n_kv_heads
    queries, keys = parts[:, : heads.n_heads], parts[:, heads.n_heads : first_value]
    return queries, keys, parts[:, first_value:]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    left, right = x[..., :half], x[..., half : 2 * half]
    rotated = left * cos - right * sin
    right.copy_(right * cos + left * sin)
    left.copy_(rotated)


def _hidden(
    position: int, count: int, first: int, length: int, attention: Attention, device: torch.device
) -> torch.Tensor:
    # True where a query must not look: [count, length - first].
    query = torch.arange(position, position + count, device=device)[:, None]
    key = torch.arange(first, length, device=device)[None, :]
    hidden = key > query
    if attention.window is not None:
        hidden |= key <= query - attention.window
    return hidden


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
