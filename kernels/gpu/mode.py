"""How the kernels are run: interpreted on a CPU or compiled; and which variants are compiled ahead.

Triton's interpreter knows no inline assembly, so each piece of it has a plain twin, chosen when its
module is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (decided before their modules are imported)."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Gate:
    """What the machine code of a linear must keep to: ``weights`` that one thread decodes in one
    turn of the main loop, and the most ``instructions`` per weight."""

    weights: int
    instructions: float


@dataclass(frozen=True)
class Specialization:
    """One variant of a kernel, as ahead-of-time compilation needs it.

    ``signature``: Triton's type of each argument by name (``*bf16``, ``i32``, ``constexpr``).
    ``constants``: values of the constexpr arguments. Pointers are 16-byte aligned, and so are the
    integers named in ``multiples_of_16``.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    multiples_of_16: tuple[str, ...] = ()
    gate: Gate | None = None
