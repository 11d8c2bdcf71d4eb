"""Schemes ``int4``, ``int4-g64``, ``int4-g128``: symmetric 4-bit integers, signed-scale search.

Per group, ``e`` is the weight of largest magnitude and ``s0 = e / -8`` puts it on code -8, so that
all 16 levels are used and about half the scales are negative. ``quant.search`` finds the scale
near ``s0`` that has the least squared error, weighed by the importance of the columns where that
is known; ``q = clamp(rint(w / s), -8, 7)``, and the stored code is q + 8.
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
    """Quantize [N, K] (bf16, f16 or f32); scales have the weight's own type.

    ModelFileError for a weight that is not finite, ValueError if no group divides K.
    """
    group = group_for(preferred, host.shape[1])
    found = search(host, Grid.INT4, group, as_prepared(inputs))
    return GroupInt(4, group, found.codes, found.scales, None, (host.shape[0], host.shape[1]))


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
        weighted=True,
        quantize=partial(quantize, preferred=group),
        bits_per_weight=partial(bits_per_weight, preferred=group),
    )


SCHEMES = (_scheme("int4", 32), _scheme("int4-g64", 64), _scheme("int4-g128", 128))
