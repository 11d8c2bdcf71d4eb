"""Scheme ``bnb-int8``: 8-bit integers with a scale per row, as bitsandbytes' LLM.int8 stores them.

Weights are rounded to f16 first, because bitsandbytes does; then ``q = rint(w * (127 / absmax))``
in fp32, and a weight is ``q * (absmax / 127)``. What LLM.int8 does to activations is not part of
it: they are never split into outliers and others.
"""

from llmrun.errors import ModelFileError
from llmrun.kernels.bnb import quantize_rows
from llmrun.kernels.forms import ROW, GroupInt
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.arrays import floats
from llmrun.quant.blocks import blocks_of_groups
from llmrun.quant.bnb_blocks import row_scales
from llmrun.quant.compensation import Prepared
from llmrun.quant.inputs import Inputs
from llmrun.quant.scheme import Scheme

NAME = "bnb-int8"
_CHECKED_WEIGHTS = 1 << 20


def quantize(host: HostArray, inputs: Inputs | Prepared | None = None) -> GroupInt:
    """Quantize [N, K] (bf16, f16 or f32) with bitsandbytes' CPU quantizer, whatever the inputs.

    ModelFileError for a weight that is not finite, or not in f16; UnavailableError without
    bitsandbytes.
    """
    n, k = host.shape
    for _, block in blocks_of_groups(host, k, _CHECKED_WEIGHTS):
        if block.half().isinf().any():
            raise ModelFileError(
                "the weights are too large for bitsandbytes, which rounds them to f16",
                "Use int8, which does not.",
            )
    codes, absmax = quantize_rows(host)
    scales = row_scales(absmax)
    numbers = floats(scales)
    numbers[numbers == 0] = 1  # harmless to whoever divides by it; the codes of these rows are 0
    return GroupInt(8, ROW, codes, scales, None, (n, k))


def bits_per_weight(shape: tuple[int, int], dtype: DType = DType.BF16) -> float:
    """Bits per weight for [N, K] of any ``dtype``."""
    return 8 + 32 / shape[1]


SCHEME = Scheme(
    name=NAME,
    summary="8-bit integers of bitsandbytes (LLM.int8), a scale per row",
    family="int8",
    group=ROW,
    weighted=False,
    quantize=quantize,
    bits_per_weight=bits_per_weight,
)
