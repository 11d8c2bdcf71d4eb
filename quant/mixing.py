"""Mixed recipes: which parts of a model get 8 bits, so that the rest can do with 4.

The unit is what engines compute with one kernel: a layer's queries, keys and values, its output
projection, its gate and up projections, its down projection, all its experts. Those of one layer
and one role, that is; every weight of a unit is stored alike, as vLLM wants it.
"""

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from llmrun.errors import UsageError
from llmrun.quant.roles import QUANTIZED_ROLES, Role

WIDE_SCHEME = "int8"
"""What widened units are stored in."""

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")


@dataclass(frozen=True, order=True)
class Unit:
    """Weights that are quantized alike: those of one layer that play one role."""

    layer: int
    role: Role

    def __str__(self) -> str:
        return f"layer {self.layer} {self.role}"


def unit_of(name: str, role: Role) -> Unit | None:
    """The unit of a weight by its canonical or published name; None if no scheme covers it."""
    match = _LAYER.fullmatch(name)
    if match is None or role not in QUANTIZED_ROLES:
        return None
    return Unit(int(match[1]), role)


@dataclass(frozen=True)
class Upgrade:
    """What widening a unit costs, and the error it takes away (of any measure that adds up)."""

    unit: Unit
    added_bytes: int
    gain: float

    @property
    def gain_per_byte(self) -> float:
        """What upgrades are chosen by."""
        return self.gain / self.added_bytes


def budget_bytes(target_bpw: float, parameters: int, base_bytes: int, wide_bytes: int) -> int:
    """Bytes there are for upgrades of ``parameters`` weights that take ``base_bytes`` without any.

    UsageError for a target below what the scheme itself needs or above that of 8 bits for all.
    """
    least, most = (8 * count / parameters for count in (base_bytes, wide_bytes))
    if not least <= target_bpw <= most:
        # Rounded inwards, so that both can be typed.
        low, high = math.ceil(1000 * least) / 1000, math.floor(1000 * most) / 1000
        raise UsageError(
            f"a target of {target_bpw:g} bits per weight cannot be reached: "
            f"this scheme alone takes {low:.3f}, and {WIDE_SCHEME} for all weights {high:.3f}",
            f"give --target-bpw a number from {low:.3f} to {high:.3f}",
        )
    return int(target_bpw * parameters / 8) - base_bytes


def chosen(candidates: Iterable[Upgrade], budget: int) -> frozenset[Unit]:
    """The units to widen: most gain per added byte first, as long as they fit the budget.

    One that no longer fits is passed over for smaller ones; equals go by layer and role, and a
    unit without any gain is left as it is.
    """
    order = sorted(candidates, key=lambda upgrade: (-upgrade.gain_per_byte, upgrade.unit))
    picked = []
    for upgrade in order:
        if upgrade.gain > 0 and upgrade.added_bytes <= budget:
            picked.append(upgrade.unit)
            budget -= upgrade.added_bytes
    return frozenset(picked)


def summary(widened: Collection[Unit]) -> str:
    """The units in words: layers by role, neighbours drawn together."""
    by_role: dict[Role, list[int]] = {}
    for unit in sorted(widened):
        by_role.setdefault(unit.role, []).append(unit.layer)
    return "; ".join(f"{role} of {_ranges(layers)}" for role, layers in sorted(by_role.items()))


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
