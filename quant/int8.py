"""Scheme ``int8``: symmetric 8-bit integers, one scale per 128 weights.

``s = round_to_file_type(absmax / 127)``, ``q = clamp(rint(w / s), -127, 127)``, all in fp32 with
true division; a scale that rounds to zero becomes 1 with all codes 0. The stored code is q + 128.
Errors are compensated where the inputs' second moments are known. The work is done by the native
library, or by torch where there is none; both give the same bytes.
"""

from typing import TYPE_CHECKING

from llmrun.kernels.cpu import quantize as native
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.forms import GroupInt
from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.blocks import blocks_of_groups, not_finite, working_blocks
from llmrun.quant.compensation import Prepared, as_prepared
from llmrun.quant.inputs import Inputs
from llmrun.quant.scheme import Scheme, group_for
from llmrun.quant.search import Grid, search

if TYPE_CHECKING:
    import torch

GROUP = 128


def quantize(host: HostArray, inputs: Inputs | Prepared | None = None) -> GroupInt:
    """Quantize [N, K] (bf16, f16 or f32); scales have the weight's own type.

    ModelFileError for a weight that is not finite, ValueError if no group divides K.
    """
    n, k = host.shape
    group = group_for(GROUP, k)
    prepared = as_prepared(inputs)
    if prepared.factors:
        found = search(host, Grid.INT8, group, prepared)
        return GroupInt(8, group, found.codes, found.scales, None, (n, k))
    if problem() is not None:
        return quantize_with_torch(host, group)
    codes, scales = empty(DType.U8, (n, k)), empty(host.dtype, (n, k // group))
    bad = native.int8(host, group, codes, scales)
    if bad is not None:
        raise not_finite(host, bad)
    return GroupInt(8, group, codes, scales, None, (n, k))


def quantize_with_torch(host: HostArray, group: int, block_weights: int | None = None) -> GroupInt:
    """The same, ``block_weights`` at a time."""
    from llmrun.kernels.reference.arrays import like_host

    n, k = host.shape
    codes, codes_view = like_host(DType.U8, (n, k))
    scales, scales_view = like_host(host.dtype, (n, k // group))
    with working_blocks() as preferred_weights:
        for start, block in blocks_of_groups(host, group, block_weights or preferred_weights):
            block_slice = slice(start, start + block.shape[0])
            _quantize_block(
                block, codes_view.view(-1, group)[block_slice], scales_view.view(-1)[block_slice]
            )
    return GroupInt(8, group, codes, scales, None, (n, k))


def _quantize_block(block: "torch.Tensor", codes: "torch.Tensor", scales: "torch.Tensor") -> None:
    """Fill codes [B, group] and scales [B] from weights [B, group]."""
    import torch

    weights = block.float()
    low, high = torch.aminmax(weights, dim=1)
    scales.copy_(torch.maximum(high, -low).div_(127))
    scales[scales == 0] = 1
    levels = torch.div(weights, scales.float().unsqueeze(1)).round_().clamp_(-127, 127)
    codes.copy_(levels.add_(128))


def bits_per_weight(shape: tuple[int, int], dtype: DType = DType.BF16) -> float:
    """Bits per weight for [N, K] of ``dtype``: 8.125 with 16-bit scales where 128 divides K."""
    return 8 + dtype.bits / group_for(GROUP, shape[1])


SCHEME = Scheme(
    name="int8",
    summary="8-bit integers, symmetric, a scale per 128 weights: close to lossless",
    family="int8",
    group=GROUP,
    weighted=True,
    quantize=quantize,
    bits_per_weight=bits_per_weight,
)
