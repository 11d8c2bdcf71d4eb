"""The recipe: which weights a scheme quantizes, decided from headers before any work.

Roles decide scope. A weight whose width no group divides stays as it is, one that is quantized
already is kept; every decision carries its reason, and nothing is decided later.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmrun.errors import InternalError, ModelFileError
from llmrun.kernels.forms import ROW, Dense, Form
from llmrun.quant.compensation import Prepared
from llmrun.quant.inputs import Inputs
from llmrun.quant.mixing import WIDE_SCHEME, Unit, unit_of
from llmrun.quant.roles import QUANTIZED_ROLES, Role
from llmrun.quant.scheme import Scheme, find, fitting_group

DENSE_KINDS = ("bf16", "f16", "f32")
"""Stored types a scheme can start from, in lower case."""

RESIDENT_SCHEME = "int8"
"""What embedding and head become in memory: relative error 0.004-0.010 %, half the bytes."""


@dataclass(frozen=True)
class Planned:
    """What happens to one weight: the scheme's name, or None to keep it as it is, and why."""

    scheme: str | None
    reason: str


def plan(
    scheme: Scheme | None,
    weights: Mapping[str, tuple[Role, tuple[int, ...], str]],
    *,
    resident: bool,
    widened: Collection[Unit] = (),
) -> dict[str, Planned]:
    """Decide for each weight, given as (role, shape, stored kind), under a scheme or None.

    ``resident``: the result is for memory, so embedding and head become int8; otherwise it is
    for disk, where they stay 16 bit because other engines expect them so. ``widened``: units of
    a mixed recipe that get 8 bits.
    """
    wide = find(WIDE_SCHEME) if widened else scheme

    def own(name: str, role: Role) -> Scheme | None:
        return wide if unit_of(name, role) in widened else scheme

    return {
        name: _planned(own(name, role), role, shape, kind, resident)
        for name, (role, shape, kind) in weights.items()
    }


def _planned(
    scheme: Scheme | None, role: Role, shape: tuple[int, ...], kind: str, resident: bool
) -> Planned:
    if scheme is None:
        return Planned(None, "kept as in the file: no scheme was asked for")
    if role in (Role.EMBEDDING, Role.HEAD):
        if not resident:
            return Planned(None, f"{role} is never quantized on disk, as other engines expect it")
        scheme = find(RESIDENT_SCHEME)
    elif role not in QUANTIZED_ROLES:
        return Planned(None, f"{role} is never quantized")
    if kind.lower() not in DENSE_KINDS:
        return Planned(None, f"kept as in the file: already stored as {kind}")
    if len(shape) != 2:
        return Planned(None, f"not a matrix: {_text(shape)}")
    group = fitting_group(scheme.group, shape[1])
    if group is None:
        return Planned(None, f"{_text(shape)}: no group of 128, 64 or 32 divides {shape[1]}")
    if group == ROW:
        return Planned(scheme.name, f"{scheme.name} with a scale per row")
    if group < scheme.group:
        return Planned(
            scheme.name,
            f"{scheme.name} with groups of {group}: {scheme.group} does not divide {shape[1]}",
        )
    return Planned(scheme.name, f"{scheme.name} with groups of {group}")


def apply(planned: Planned, name: str, form: Form, inputs: Inputs | Prepared | None = None) -> Form:
    """Give a weight the planned form; with no scheme planned it is returned untouched.

    ``inputs``: what is known of the linear's inputs, for schemes that weigh errors by it.
    ModelFileError naming the tensor and the index of a weight that is not finite.
    """
    if planned.scheme is None:
        return form
    if not isinstance(form, Dense):
        raise InternalError(
            f"{name}: planned to become {planned.scheme}, but it is stored as {form.kind}",
            "Please report this with the model's name.",
        )
    try:
        scheme = find(planned.scheme)
        return scheme.quantize(form.w) if inputs is None else scheme.quantize(form.w, inputs)
    except ModelFileError as error:
        raise ModelFileError(f"{name}: {error.what}", error.next_step) from error


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(str(extent) for extent in shape)
