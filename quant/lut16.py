"""What ``nf4`` and ``fp4`` share: bitsandbytes' codes as a Lut16 form with fp32 scales.

bitsandbytes counts blocks of 64 over the flattened weight, so blocks straddle rows where 64 does
not divide K. Where 32 divides K the form is still exact: groups of 32, each absmax repeated. With
double quantization (``-dq``) the scales are those that the quantized ones stand for.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from llmrun.errors import ModelFileError
from llmrun.kernels.bnb import BLOCK, NESTED_BLOCK, Nested, nest, quantize_4bit
from llmrun.kernels.forms import Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.arrays import first_overflow
from llmrun.quant.blocks import blocks_of_groups
from llmrun.quant.bnb_blocks import NestedScales, nested_scales
from llmrun.quant.compensation import Prepared
from llmrun.quant.inputs import Inputs
from llmrun.quant.scheme import Scheme, group_for

Kind = Literal["nf4", "fp4"]

GROUP = 64
_CHECKED_WEIGHTS = 1 << 20


@dataclass(frozen=True, eq=False)
class Parts:
    """A weight as bitsandbytes stores it.

    ``codes`` u8 [N K/2], flattened, high nibble = even index; ``table`` f32 [16]; ``absmax`` f32
    [ceil(N K/64)]; ``nested``: what stands for ``absmax`` on disk with double quantization.
    """

    codes: HostArray
    table: HostArray
    absmax: HostArray
    nested: Nested | None


def parts(host: HostArray, kind: Kind, *, nested: bool) -> Parts:
    """Quantize [N, K] (bf16, f16 or f32) with bitsandbytes' CPU quantizer; 32 divides K.

    ModelFileError for a weight that is not finite, UnavailableError without bitsandbytes.
    """
    for _ in blocks_of_groups(host, group_for(GROUP, host.shape[1]), _CHECKED_WEIGHTS):
        pass  # refuses weights that are not finite: bitsandbytes would accept them
    codes, absmax, table = quantize_4bit(host, kind)
    made = Parts(codes, table, absmax, nest(absmax) if nested else None)
    inner = made.nested
    if inner is not None and not (
        math.isfinite(inner.offset) and first_overflow(scales_of(made), 1) is None
    ):
        raise ModelFileError(
            "the weights are too large for scales that are quantized too",
            f"Use {kind}, whose scales are not.",
        )
    return made


def scales_of(made: Parts) -> HostArray:
    """The scale F32 of each block of 64, as it is stored or as nested scales give it."""
    inner = made.nested
    if inner is None:
        return made.absmax
    return nested_scales(inner.codes, inner.table, inner.absmax, NESTED_BLOCK, inner.offset)


def form_of(made: Parts, shape: tuple[int, int]) -> Lut16:
    """The form that holds the same weights; group 64, or 32 where only that divides K."""
    import torch

    from llmrun.kernels.reference.arrays import as_tensor, like_host

    n, k = shape
    group = group_for(GROUP, k)
    codes, codes_view = like_host(DType.U8, (n, k // 2))
    nibbles = as_tensor(made.codes)
    torch.bitwise_or(nibbles >> 4, nibbles << 4, out=codes_view.view(-1))
    scales, scales_view = like_host(DType.F32, (n, k // group))
    per_block = as_tensor(scales_of(made))
    per_group = per_block.repeat_interleave(BLOCK // group)[: scales.size]
    scales_view.copy_(per_group.view(n, -1))
    # A scale of 1 stays harmless in any kernel that divides by it; codes of the table's 0 keep
    # the weights what they are.
    zeros = scales_view == 0
    scales_view[zeros] = 1
    zero_code = int((as_tensor(made.table) == 0).nonzero()[0])
    codes_view.view(n, k // group, group // 2)[zeros] = zero_code * 17
    if made.nested is not None:
        scales = NestedScales(scales.dtype, scales.shape, scales.data, made.nested)
    return Lut16(group, codes, made.table, scales, shape)


def quantize(
    host: HostArray,
    inputs: Inputs | Prepared | None = None,
    *,
    kind: Kind,
    nested: bool = False,
) -> Lut16:
    """Quantize [N, K] (bf16, f16 or f32) with bitsandbytes' CPU quantizer, whatever the inputs.

    Group 64, or 32 where only that divides K (ValueError if neither does). ModelFileError for a
    weight that is not finite, UnavailableError without bitsandbytes.
    """
    return form_of(parts(host, kind, nested=nested), (host.shape[0], host.shape[1]))


def bits_per_weight(shape: tuple[int, int], dtype: DType = DType.BF16) -> float:
    """Bits per weight for [N, K] of any ``dtype`` in memory, the table of 64 bytes included."""
    n, k = shape
    return 4 + 32 / group_for(GROUP, k) + 512 / (n * k)


def scheme(name: str, summary: str, kind: Kind, *, nested: bool = False) -> Scheme:
    """A scheme of bitsandbytes."""
    return Scheme(
        name=name,
        summary=summary,
        family="lut4",
        group=GROUP,
        weighted=False,
        quantize=partial(quantize, kind=kind, nested=nested),
        bits_per_weight=bits_per_weight,
    )
