"""Sums of weighted errors in a fixed order, and which weights can be used; see ``quant.search``."""

from typing import TYPE_CHECKING

from llmrun.kernels.host import HostArray

if TYPE_CHECKING:
    import torch


def lane_sum(terms: "torch.Tensor") -> "torch.Tensor":
    """Sum [group, B] over the group: 8 lanes k mod 8 in ascending k, then
    ((0+4)+(2+6)) + ((1+5)+(3+7)). Overwrites ``terms``."""
    lanes = terms[:8]
    for k in range(8, terms.shape[0], 8):
        lanes.add_(terms[k : k + 8])
    halves = lanes[:4].add_(lanes[4:])
    quarters = halves[:2].add_(halves[2:])
    return quarters[0].add_(quarters[1])


def usable(importance: HostArray) -> bool:
    """Whether an importance F32 [K] can weigh errors: finite and above zero everywhere."""
    values = importance.data.cast("B").cast("f")
    return all(0 < value < float("inf") for value in values)
