"""Schemes ``int4``, ``int4-g64``, ``int4-g128``: symmetric 4-bit integers, signed-scale search.

Per group, in fp32: ``e`` is the weight of largest magnitude (lowest k wins a tie), ``s0 = e / -8``
puts it on code -8, so that all 16 levels are used and about half the scales are negative. For c in
0.70, 0.72 ... 1.10: ``s = round_to_file_type(s0 * c)``, ``q = clamp(rint(w / s), -8, 7)``, error
``sum w^2 (w - q s)^2``; the first smallest error wins. The order of every sum is part of the
definition (``lane_sum``), so that any kernel can give the same bytes. The stored code is q + 8.
"""

from functools import partial
from typing import TYPE_CHECKING

from llmrun.kernels.forms import GroupInt
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.blocks import blocks_of_groups, working_blocks
from llmrun.quant.scheme import Scheme, group_for

if TYPE_CHECKING:
    import torch

FACTORS = tuple(percent / 100 for percent in range(70, 111, 2))
"""Candidates for the scale, as multiples of ``s0``, in the order they are tried."""

_UNREACHABLE = 2.0**64
"""Stands for a candidate whose stored scale is zero: every code becomes 0, the error w^4."""


def quantize(host: HostArray, preferred: int = 32, block_weights: int | None = None) -> GroupInt:
    """Quantize [N, K] (bf16, f16 or f32); scales have the weight's own type.

    ModelFileError for a weight that is not finite, ValueError if no group divides K.
    """
    import torch

    from llmrun.kernels.reference.arrays import like_host

    n, k = host.shape
    group = group_for(preferred, k)
    codes, codes_view = like_host(DType.U8, (n, k // 2))
    scales, scales_view = like_host(host.dtype, (n, k // group))
    with working_blocks() as preferred_weights:
        block_weights = max(group, block_weights or preferred_weights)
        scratch = torch.empty(3, min(block_weights, host.size))
        for start, block in blocks_of_groups(host, group, block_weights):
            # Groups lie along the columns: every step then runs over contiguous memory, with one
            # scale per column, and the error sums add whole rows in a fixed order.
            weights, importance, work = scratch[:, : block.numel()].view(3, group, -1).unbind()
            weights.copy_(block.t())
            stored = _search(weights, importance, work, scales_view.dtype)
            levels = work.add_(8)
            packed = levels[1::2].mul_(16).add_(levels[0::2]).to(torch.uint8)
            end = start + block.shape[0]
            codes_view.view(-1, group // 2)[start:end] = packed.t()
            scales_view.view(-1)[start:end] = stored
    return GroupInt(4, group, codes, scales, None, (n, k))


def _search(
    weights: "torch.Tensor", importance: "torch.Tensor", work: "torch.Tensor", dtype: "torch.dtype"
) -> "torch.Tensor":
    """Return the stored scales [B]; leave q [group, B] in ``work``. Overwrites all three.

    Weights and scales are first brought near 1 by a power of two per group. That is exact and
    changes no choice, but keeps w^4 from vanishing below 1e-10 or overflowing above 1e9.
    """
    import torch

    magnitude, position = torch.abs(weights, out=work).max(dim=0)  # the first of equals
    extreme = weights.gather(0, position.unsqueeze(0))  # (1, B)
    _, exponent = torch.frexp(magnitude)
    # 2^-exponent by its bits: no library's pow has to be exact for it.
    power = ((127 - exponent.clamp_(-126, 126)) << 23).view(torch.float32)
    factors = torch.tensor(FACTORS).unsqueeze(1)
    candidates = extreme.div(-8).mul(factors).to(dtype)  # (candidates, B)
    scales = candidates.float() * power
    scales[candidates == 0] = _UNREACHABLE
    weights.mul_(power)
    torch.mul(weights, weights, out=importance)

    least = torch.full_like(magnitude, torch.inf)
    best = torch.zeros_like(position)
    for index, scale in enumerate(scales):
        _round_to_codes(weights, scale, work)
        torch.sub(weights, work.mul_(scale), out=work)
        error = lane_sum(work.mul_(work).mul_(importance))
        best.masked_fill_(error < least, index)
        torch.minimum(least, error, out=least)
    best.unsqueeze_(0)
    _round_to_codes(weights, scales.gather(0, best).squeeze(0), work)
    stored = candidates.gather(0, best).squeeze(0)
    stored[stored == 0] = 1
    return stored


def _round_to_codes(weights: "torch.Tensor", scale: "torch.Tensor", out: "torch.Tensor") -> None:
    import torch

    torch.div(weights, scale, out=out).round_().clamp_(-8, 7)


def lane_sum(terms: "torch.Tensor") -> "torch.Tensor":
    """Sum [group, B] over the group: 8 lanes k mod 8 in ascending k, then
    ((0+4)+(2+6)) + ((1+5)+(3+7)). Overwrites ``terms``."""
    lanes = terms[:8]
    for k in range(8, terms.shape[0], 8):
        lanes.add_(terms[k : k + 8])
    halves = lanes[:4].add_(lanes[4:])
    quarters = halves[:2].add_(halves[2:])
    return quarters[0].add_(quarters[1])


def bits_per_weight(
    shape: tuple[int, int], dtype: DType = DType.BF16, preferred: int = 32
) -> float:
    """Bits per weight for [N, K] of ``dtype``: 4.5 at group 32 with scales of 16 bits."""
    return 4 + dtype.bits / group_for(preferred, shape[1])


def _scheme(name: str, group: int) -> Scheme:
    return Scheme(
        name=name,
        summary=f"4-bit integers, symmetric, searched scale per {group} weights",
        family="int4",
        group=group,
        publishable=True,
        quantize=partial(quantize, preferred=group),
        bits_per_weight=partial(bits_per_weight, preferred=group),
    )


SCHEMES = (_scheme("int4", 32), _scheme("int4-g64", 64), _scheme("int4-g128", 128))
