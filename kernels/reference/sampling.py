"""``pick``: choosing one id from a row of logits, in float64 with counter-based random numbers.

The random number of (seed, draw, id) is the first word of Philox 4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", 2011) with key = seed and counter = (draw, id). The id with the
largest ``log p + Gumbel noise`` wins, which draws from p. So the same seed and logits give the same
id on every backend, whatever the order of the candidates.
"""

from collections.abc import Sequence

import torch

from llmrun.errors import InternalError
from llmrun.kernels.ops import Pick, PickRequest

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def pick(logits: torch.Tensor, request: PickRequest) -> Pick:
    """Choose an id from logits [V] fp32. InternalError if one of them is not finite."""
    row = logits[: request.vocab]
    if not bool(torch.isfinite(row).all()):
        raise InternalError(
            "the model produced logits that are not finite numbers",
            "check the model's files with a fresh `llmrun pull`, or try another scheme with -q",
        )
    scores = _adjusted(row, request)
    sampling = request.sampling
    if sampling.temperature == 0.0:
        token_id = int(torch.argmax(scores))
    else:
        ids = _candidates(scores, request)
        noise = -torch.log(-torch.log(uniform(sampling.seed, request.draw, ids)))
        token_id = int(ids[torch.argmax(scores[ids] / sampling.temperature + noise)])
    return _with_logprobs(row, token_id, sampling.top_logprobs)


def uniform(seed: int, draw: int, ids: torch.Tensor) -> torch.Tensor:
    """Uniform float64 numbers in (0, 1), one per id [n] int64."""
    counter = [
        torch.full_like(ids, draw & _MASK),
        torch.full_like(ids, (draw >> 32) & _MASK),
        ids.clone(),
        torch.zeros_like(ids),
    ]
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        high0, low0 = _multiply(counter[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(counter[2], _MULTIPLIERS[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(k + s) & _MASK for k, s in zip(key, _KEY_STEPS, strict=True)]
    return (counter[0].double() + 0.5) / 2.0**32


def _multiply(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    # 32 x 32 -> 64 bit in signed 64-bit arithmetic: 16-bit halves keep every partial below 2^49.
    low, high = x & 0xFFFF, x >> 16
    bottom = low * factor
    top = high * factor + (bottom >> 16)
    return top >> 16, ((top & 0xFFFF) << 16) | (bottom & 0xFFFF)


def _adjusted(row: torch.Tensor, request: PickRequest) -> torch.Tensor:
    scores = row.double()
    for token_id, amount in request.bias:
        scores[token_id] += amount
    if request.allowed is not None:
        allowed = torch.tensor(request.allowed, dtype=torch.int64, device=row.device)
        masked = torch.full_like(scores, float("-inf"))
        masked[allowed] = scores[allowed]
        scores = masked
    penalty = request.sampling.repeat_penalty
    if penalty != 1.0 and request.history:
        seen = torch.tensor(sorted(set(request.history)), dtype=torch.int64, device=row.device)
        seen = seen[seen < request.vocab]
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / penalty, old * penalty)
    return scores


def _candidates(scores: torch.Tensor, request: PickRequest) -> torch.Tensor:
    # Ids that survive top-k, top-p and min-p, in this order; ties by lowest id (stable sort).
    sampling = request.sampling
    ids = torch.nonzero(scores > float("-inf")).flatten()
    scaled = scores[ids] / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        floor = scaled.max() + _log(sampling.min_p)
        return ids[scaled >= floor]
    order = torch.sort(scaled, descending=True, stable=True).indices
    if sampling.top_k:
        order = order[: sampling.top_k]
    probabilities = torch.softmax(scaled[order], dim=0)
    before = torch.cumsum(probabilities, dim=0) - probabilities
    keep = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
    keep[0] = True
    return ids[order[keep]]


def _log(value: float) -> float:
    return float(torch.log(torch.tensor(value, dtype=torch.float64)))


def _with_logprobs(row: torch.Tensor, token_id: int, n_top: int) -> Pick:
    logprobs = torch.log_softmax(row.double(), dim=0)
    top: Sequence[tuple[int, float]] = ()
    if n_top:
        best = torch.topk(logprobs, min(n_top, len(logprobs)))
        top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Pick(token_id, float(logprobs[token_id]), tuple(top))
