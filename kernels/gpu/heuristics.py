"""How the linear kernels are launched on a card: warps, pipeline stages and parts of a product.

The nearest known launch is taken, so every shape has one. What ``llmrun tune`` measured on the
machine comes first, then a rule. Parts and warps do not depend on the number of rows: a row's bits
would otherwise change with the rows beside it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from llmrun.kernels.gpu.arrays import TILE_K, TILE_N, padded


@dataclass(frozen=True)
class Card:
    """A card's compute capability (90 for 9.0) and its number of multiprocessors."""

    sm: int
    n_sms: int


@dataclass(frozen=True)
class Shape:
    """What a launch is chosen for: a weight's form, group and size, two of them side by side with
    ``pair``."""

    form: str
    group: int
    n: int
    k: int
    pair: bool = False


@dataclass(frozen=True)
class Launch:
    """``splits``: parts of the columns, a program each. ``stages``: of the pipeline, for at most 8,
    16 and 32 rows."""

    splits: int
    stages: tuple[int, int, int] = (4, 4, 3)
    warps: int = 2

    def stages_for(self, m: int) -> int:
        """Stages for m rows."""
        return self.stages[0 if m <= 8 else 1 if m <= 16 else 2]


Tuned = Mapping[tuple[int, Shape], Launch]
"""Measured launches by compute capability and shape."""

PROGRAMS_PER_SM = 4
"""Programs wanted on a multiprocessor: with 12 KB under way in each, enough to hide the memory."""

LEAST_TILES = 4
"""Column tiles of a part, at least: fewer would not fill its pipeline."""

MOST_SPLITS = 8

NEAR = 1.0
"""How far, in powers of two of N and K together, a measured shape may be and still count."""


@cache
def card_of(device: torch.device) -> Card:
    """The card behind a device; where kernels are interpreted, an H100."""
    if device.type != "cuda":
        return Card(90, 132)
    properties = torch.cuda.get_device_properties(device)
    return Card(10 * properties.major + properties.minor, properties.multi_processor_count)


def choose(card: Card, shape: Shape, tuned: Tuned | None = None) -> Launch:
    """The launch for a shape: measured for it or for one close by, else by the rule."""
    measured = {
        other: launch
        for (sm, other), launch in (tuned or {}).items()
        if sm == card.sm
        and (other.form, other.group, other.pair) == (shape.form, shape.group, shape.pair)
    }
    if measured:
        nearest = min(measured, key=lambda other: distance(shape, other))
        if distance(shape, nearest) <= NEAR:
            return measured[nearest]
    return by_rule(card, shape)


def distance(one: Shape, other: Shape) -> float:
    """Powers of two between two sizes, N and K added."""
    return abs(math.log2(one.n / other.n)) + abs(math.log2(one.k / other.k))


def by_rule(card: Card, shape: Shape) -> Launch:
    """Enough parts, a power of two of them, to keep every multiprocessor reading."""
    rows, columns = padded(shape.n, TILE_N) // TILE_N, padded(shape.k, TILE_K) // TILE_K
    wanted = min(PROGRAMS_PER_SM * card.n_sms / rows, columns / LEAST_TILES, MOST_SPLITS)
    splits = 1 << max(0, math.floor(math.log2(wanted)))
    wide = shape.form == "dense"  # four times the bytes of 4-bit codes in each stage
    return Launch(splits, (3, 3, 2) if wide else (4, 4, 3))
