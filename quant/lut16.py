"""What ``nf4`` and ``fp4`` share: bitsandbytes' codes as a Lut16 form with fp32 scales.

bitsandbytes counts blocks of 64 over the flattened weight, so blocks straddle rows where 64 does
not divide K. Where 32 divides K the form is still exact: groups of 32, each absmax repeated.
"""

from typing import Literal

from llmrun.kernels.forms import Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.blocks import blocks_of_groups
from llmrun.quant.scheme import group_for

GROUP = 64
_CHECKED_WEIGHTS = 1 << 20
REASON_UNPUBLISHABLE = (
    "no checkpoint format that other engines load holds a 4-bit lookup table; "
    "use int4 to write a model to disk"
)


def quantize(host: HostArray, kind: Literal["nf4", "fp4"]) -> Lut16:
    """Quantize [N, K] (bf16, f16 or f32) with bitsandbytes' CPU quantizer.

    Group 64, or 32 where only that divides K (ValueError if neither does). ModelFileError for a
    weight that is not finite, UnavailableError without bitsandbytes.
    """
    import torch

    from llmrun.kernels.bnb import BLOCK, quantize_4bit
    from llmrun.kernels.reference.arrays import as_tensor, like_host

    n, k = host.shape
    group = group_for(GROUP, k)
    for _ in blocks_of_groups(host, group, _CHECKED_WEIGHTS):
        pass  # refuses weights that are not finite: bitsandbytes would accept them
    swapped, absmax, table = quantize_4bit(host, kind)

    codes, codes_view = like_host(DType.U8, (n, k // 2))
    nibbles = as_tensor(swapped)
    torch.bitwise_or(nibbles >> 4, nibbles << 4, out=codes_view.view(-1))
    scales, scales_view = like_host(DType.F32, (n, k // group))
    per_group = as_tensor(absmax).repeat_interleave(BLOCK // group)[: scales.size]
    scales_view.copy_(per_group.view(n, -1))
    # A block of zeros: its codes point at the table's 0, and a scale of 1 stays harmless in any
    # kernel that divides by it.
    scales_view[scales_view == 0] = 1
    return Lut16(group, codes, table, scales, (n, k))


def bits_per_weight(shape: tuple[int, int], dtype: DType = DType.BF16) -> float:
    """Bits per weight for [N, K] of any ``dtype``, the table of 64 bytes included."""
    n, k = shape
    return 4 + 32 / group_for(GROUP, k) + 512 / (n * k)
