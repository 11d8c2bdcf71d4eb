"""How much an error of a weight counts when a scale is searched; see ``quant.search``.

The importance h of its column (E[x^2], 1 where nothing is known of the inputs) times a function of
the weight, which depends on the grid.
"""

from enum import Enum
from typing import TYPE_CHECKING

from llmrun.kernels.cpu import quantize as native
from llmrun.kernels.host import HostArray

if TYPE_CHECKING:
    import torch


class Weighing(Enum):
    """What the importance of a column is multiplied by."""

    ALIKE = native.ALIKE
    """1: the error of the layer's output, if inputs were independent."""
    ROOT = native.ROOT
    """sqrt(mean of w^2 over the group + w^2)."""
    SQUARE = native.SQUARE
    """w^2."""


def importance_of(
    weights: "torch.Tensor", weighing: Weighing, columns: "torch.Tensor | None"
) -> "torch.Tensor":
    """Return a [group, B] for weights [group, B] near 1; ``columns``: h [group, B] or [group, 1].

    The order of all operations is part of the definition.
    """
    import torch

    importance = torch.ones_like(weights) if weighing is Weighing.ALIKE else weights * weights
    if weighing is Weighing.ROOT:
        mean = lane_sum(importance.clone()).div_(importance.shape[0])
        # By way of fp64: torch's own fp32 square root is not always the nearest number.
        importance = importance.add_(mean).double().sqrt_().float()
    return importance if columns is None else importance.mul_(columns)


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
