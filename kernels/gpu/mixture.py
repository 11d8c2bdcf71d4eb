"""A mixture of experts: the router on the device, the choice read by the host, expert by expert.

The host waits for the choice of every layer, so no CUDA graph can hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmrun.kernels.gpu.prefill import Prefill, normed
from llmrun.kernels.ops import Expert, Linear, Norm


@dataclass(frozen=True)
class MoeShare:
    """How much each of the ``top_k`` chosen experts counts: its probability, if ``normalize``
    divided by the sum of the chosen ones, times ``scale``."""

    top_k: int
    normalize: bool
    scale: float


def moe_add(
    products: Prefill,
    h: torch.Tensor,
    norm: Norm,
    router: Linear,
    experts: Sequence[Expert],
    activation: str,
    share: MoeShare,
) -> None:
    """h fp32 [T, D] += the chosen experts of norm(h), each weighted by its share."""
    x = normed(h, norm)
    scores = torch.empty(len(h), len(experts), device=h.device)
    products.multiply(x, router, scores)
    chosen = torch.topk(torch.softmax(scores, dim=-1), share.top_k)
    parts = chosen.values
    if share.normalize:
        parts = parts / parts.sum(-1, keepdim=True)
    parts = parts * share.scale
    inner = experts[0].gate.weight.shape[0]
    for number in sorted(set(chosen.indices.flatten().tolist())):
        expert = experts[number]
        token, rank = torch.nonzero(chosen.indices == number, as_tuple=True)
        a = torch.empty(len(token), inner, device=h.device)
        products.gate_up(x[token], expert.gate, expert.up, activation, a)
        y = torch.empty(len(token), h.shape[1], device=h.device)
        products.multiply(normed(a, None), expert.down, y)
        h.index_add_(0, token, y * parts[token, rank].unsqueeze(-1))
