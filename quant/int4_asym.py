"""Schemes ``int4-asym``, ``-g64``, ``-g128``: 4-bit integers with an integer zero point per group.

The range of a group's weights and 0 is cut into 15 steps; ``quant.search`` finds scale and zero
point z near that. ``u = clamp(rint(w / s), -z, 15 - z) + z`` stands for ``s (u - z)``.
"""

from functools import partial

from llmrun.kernels.forms import GroupInt
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.compensation import Prepared, as_prepared
from llmrun.quant.inputs import Inputs
from llmrun.quant.scheme import Scheme, group_for
from llmrun.quant.search import Grid, search


def quantize(
    host: HostArray, inputs: Inputs | Prepared | None = None, *, preferred: int = 32
) -> GroupInt:
    """Quantize [N, K] (bf16, f16 or f32); scales have the weight's own type, zero points are U8.

    ModelFileError for a weight that is not finite, ValueError if no group divides K.
    """
    group = group_for(preferred, host.shape[1])
    found = search(host, Grid.INT4_ZERO, group, as_prepared(inputs))
    shape = (host.shape[0], host.shape[1])
    return GroupInt(4, group, found.codes, found.scales, found.zeros, shape)


def bits_per_weight(
    shape: tuple[int, int], dtype: DType = DType.BF16, preferred: int = 32
) -> float:
    """Bits per weight for [N, K] of ``dtype`` in memory: 4.75 at group 32 with 16-bit scales."""
    return 4 + (dtype.bits + 8) / group_for(preferred, shape[1])


def _scheme(name: str, group: int) -> Scheme:
    return Scheme(
        name=name,
        summary=f"4-bit integers, searched scale and zero point per {group} weights",
        family="int4",
        suffix=" +zero",
        group=group,
        weighted=True,
        quantize=partial(quantize, preferred=group),
        bits_per_weight=partial(bits_per_weight, preferred=group),
    )


SCHEMES = (
    _scheme("int4-asym", 32),
    _scheme("int4-asym-g64", 64),
    _scheme("int4-asym-g128", 128),
)
