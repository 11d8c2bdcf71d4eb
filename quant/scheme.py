"""Schemes: recipes that make a storage form from a dense weight, found by walking this folder.

A module that exports ``SCHEME`` or ``SCHEMES`` adds schemes; a name taken twice is an error. A
scheme has one preferred group size; the groups it may fall back to are part of the contract here,
so that plans, sizes and quantizers agree. Light: torch is imported when a weight is quantized.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import llmrun.quant
from llmrun.errors import InternalError, UnavailableError
from llmrun.kernels.forms import ROW, Form
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.compensation import Prepared
from llmrun.quant.inputs import Inputs

GROUPS = (128, 64, 32)
"""Group sizes schemes make, widest first: also the order of the fallback."""


class BitsPerWeight(Protocol):
    """Predicts the bits per weight of a quantized [N, K] from its shape and source type."""

    def __call__(self, shape: tuple[int, int], dtype: DType = DType.BF16) -> float:
        """Return the bits per weight; ValueError if no group divides K."""


class Quantize(Protocol):
    """Makes a form of a weight, with what is known of the linear's inputs.

    With importance the errors of a search are weighed, with Gram blocks they are compensated too.
    Whoever quantizes several weights with the same inputs prepares these once
    (``quant.compensation.prepare``), and finds there what could not be used.
    """

    def __call__(self, host: HostArray, inputs: Inputs | Prepared | None = None) -> Form:
        """Return the form; errors as ``Scheme`` says."""


@dataclass(frozen=True)
class Scheme:
    """What a user asks for by ``name``.

    ``group``: the preferred group size along K, or ROW. ``quantize``: [N, K] bf16, f16 or f32 to a
    form, with the widest group <= ``group`` that divides K (ValueError if none does; ModelFileError
    giving the index of a weight that is not finite). ``bits_per_weight``: what ``quantize`` will
    need, scales and table included. ``family``: first word of the ``kind`` of the forms it makes,
    ``suffix``: what follows the group in it. ``weighted``: ``quantize`` makes use of inputs; other
    schemes give the same bytes with them as without.
    """

    name: str
    summary: str
    family: str
    group: int
    weighted: bool
    quantize: Quantize = field(repr=False)
    bits_per_weight: BitsPerWeight = field(repr=False)
    suffix: str = ""

    def kind(self, shape: tuple[int, ...]) -> str:
        """``Form.kind`` of what ``quantize`` makes of [N, K]; ValueError if no group divides K."""
        group = group_for(self.group, shape[-1])
        return f"{self.family} {'row' if group == ROW else f'g{group}'}{self.suffix}"


def fitting_group(preferred: int, k: int) -> int | None:
    """Return the widest group size <= ``preferred`` that divides K, or None; ROW fits every K."""
    if preferred == ROW:
        return ROW
    return next((group for group in GROUPS if group <= preferred and k % group == 0), None)


def group_for(preferred: int, k: int) -> int:
    """Return the fitting group; ValueError if none fits (a recipe keeps such a weight as it is)."""
    group = fitting_group(preferred, k)
    if group is None:
        raise ValueError(f"no group of {GROUPS} up to {preferred} divides {k}")
    return group


def schemes() -> Mapping[str, Scheme]:
    """Return all schemes by name, sorted. InternalError if two modules claim one name."""
    found: dict[str, Scheme] = {}
    for module in pkgutil.iter_modules(llmrun.quant.__path__, "llmrun.quant."):
        for scheme in _exported(module.name):
            if scheme.name in found:
                raise InternalError(
                    f"the quantization scheme {scheme.name} is defined twice, "
                    f"the second time in {module.name}; known: {', '.join(sorted(found))}",
                    "Rename or remove one of the two modules.",
                )
            found[scheme.name] = scheme
    return dict(sorted(found.items()))


def find(name: str) -> Scheme:
    """Return a scheme by name. UnavailableError listing the known names."""
    known = schemes()
    if name not in known:
        raise UnavailableError(
            f"there is no quantization scheme named {name!r}",
            f"Choose one of: {', '.join(known)}.",
        )
    return known[name]


def _exported(module_name: str) -> tuple[Scheme, ...]:
    module = importlib.import_module(module_name)
    single = getattr(module, "SCHEME", None)
    return (*getattr(module, "SCHEMES", ()), *(() if single is None else (single,)))
