"""Deciding which scheme a model runs in, and what becomes of each weight in memory."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmrun.cli.source import Source, Weight, is_dense
from llmrun.errors import UnavailableError
from llmrun.kernels.forms import Form
from llmrun.quant.compensation import Prepared
from llmrun.quant.inputs import Inputs
from llmrun.quant.mixing import Unit
from llmrun.quant.recipe import RESIDENT_SCHEME, Planned, apply, plan
from llmrun.quant.requantize import OPENED_KIND, opened
from llmrun.quant.roles import QUANTIZED_ROLES, Role
from llmrun.quant.scheme import Scheme, find, fitting_group

DEFAULT_SCHEME, TABLE_SCHEME = "int4", "nl4"
TABLE_SETS = ("avxvnni", "avx512", "amx")
"""Instruction sets whose kernels look levels up as fast as they unpack integers (within a tenth, in
prompts and in decoding). There nl4 takes the place of int4: as many bits, and 0.6 of its KL
divergence. AVX2 alone takes twice as long for prompts in nl4, other backends longer still."""


SMALL_PARAMETERS, SMALL_SCHEME = 600_000_000, "int8"
"""Below so many parameters 4 bits cost too much: the catalog's rule, for all other models too."""

OPENED_SCHEME = "int8"
"""What quantized weights become that no kernel computes with as they are stored: adds a relative
squared error of 0.004 % (8-bit floats have 0.07 % themselves)."""


@dataclass(frozen=True)
class Choice:
    """What weights are brought into: a scheme, or None to keep them as they are stored.

    ``name`` is what reports call the result (``none``, a scheme, or how the file is quantized);
    ``note`` says what was decided and why. ``untouched``: nothing at all is changed, embedding
    and head included. ``requantized``: the source was quantized already.
    """

    scheme: Scheme | None
    name: str
    note: str
    untouched: bool = False
    requantized: bool = False


@dataclass(frozen=True)
class CopyOptions:
    """How a quantized copy is made, besides its scheme.

    ``calibrate``: ``auto``, ``none``, ``bundled``, ``self`` or the path of a text. ``target_bpw``:
    bits per weight of the linear layers, for which some of them get 8. ``allow_partial``: more
    bits than promised are accepted.
    """

    calibrate: str = "auto"
    target_bpw: float | None = None
    allow_partial: bool = False


def choose_scheme(
    wanted: str,
    source: Source,
    recommended: str | None,
    requantize: bool,
    isa: str | None = None,
) -> Choice:
    """Turn ``-q`` into a decision; ``isa``: what the backend's kernels are made for, if known.

    UnavailableError for an unknown scheme, or for another scheme than a quantized source has
    without ``requantize``.
    """
    stored = source.checkpoint.quantization
    if wanted == "none":
        how = stored or "not quantized"
        return Choice(None, stored or "none", f"weights as stored: {how}", untouched=True)
    if wanted == "auto" and stored is not None and _must_be_opened(source):
        scheme = find(OPENED_SCHEME)
        note = f"scheme {scheme.name}: no kernel computes with weights as stored ({stored})"
        return Choice(scheme, scheme.name, note)
    if wanted == "auto" and stored is not None:
        dense = any(
            is_dense(weight[2]) for weight in source.weights().values() if _is_outer(weight)
        )
        more = "; embedding and head become int8" if dense else ""
        return Choice(None, stored, f"weights as stored ({stored}){more}")
    if wanted == "auto":
        name, why = _recommended(source, recommended, isa)
        return Choice(find(name), name, f"scheme {name} ({why}; -q chooses another)")
    scheme = find(wanted)
    if stored is None:
        return Choice(scheme, wanted, f"scheme {wanted}")
    if has_already(scheme, source):
        return Choice(None, wanted, f"weights as stored, which is {wanted}: {stored}")
    if wanted == OPENED_SCHEME and _must_be_opened(source):
        return Choice(scheme, wanted, f"scheme {wanted}, made from {stored}")
    if not requantize:
        raise UnavailableError(
            f"the model's weights are quantized already ({stored}); making {wanted} of them "
            "would lose quality twice",
            "run it as it is (leave -q out), take the unquantized model, "
            "or accept the loss with --requantize",
        )
    return Choice(scheme, wanted, f"scheme {wanted}, made from {stored}", requantized=True)


def _recommended(source: Source, by_catalog: str | None, isa: str | None) -> tuple[str, str]:
    """A scheme for weights that are not quantized, and why."""
    parameters = sum(math.prod(shape) for _, shape, _ in source.weights().values())
    if by_catalog not in (None, "none"):
        name, why = str(by_catalog), "the catalog's recommendation"
    elif parameters < SMALL_PARAMETERS:
        name, why = (
            SMALL_SCHEME,
            f"for models below {SMALL_PARAMETERS // 1_000_000} million weights",
        )
    else:
        name, why = DEFAULT_SCHEME, "the default"
    if name == DEFAULT_SCHEME and isa in TABLE_SETS:
        return TABLE_SCHEME, f"closer to the model than {name}, and as fast on {isa}"
    return name, why


def has_already(scheme: Scheme, source: Source) -> bool:
    """Whether the linear layers of a source are stored in a scheme's form.

    A weight that no group divides is dense under the scheme, too.
    """
    covered = [weight for weight in source.weights().values() if weight[0] in QUANTIZED_ROLES]
    return all(
        is_dense(kind)
        if fitting_group(scheme.group, shape[-1]) is None
        else kind == scheme.kind(shape)
        for _, shape, kind in covered
    )


def plan_weights(
    choice: Choice, source: Source, *, resident: bool, widened: Collection[Unit] = ()
) -> dict[str, Planned]:
    """What becomes of each weight: of parameters in memory (``resident``), of tensors in files.

    ``widened``: units of a mixed recipe that get 8 bits.

    In memory the embedding and head of a quantized model are int8, also when its linear layers
    are quantized in the file.
    """
    weights = weights_to_plan(choice, source, resident=resident)
    planned = plan(choice.scheme, weights, resident=resident, widened=widened)
    if choice.scheme is None and source.is_quantized and resident and not choice.untouched:
        outer = {
            name: weight
            for name, weight in weights.items()
            if _is_outer(weight) and is_dense(weight[2])
        }
        if outer:  # to look a scheme up imports them all
            planned |= plan(find(RESIDENT_SCHEME), outer, resident=True)
    return planned


def weights_to_plan(choice: Choice, source: Source, *, resident: bool) -> Mapping[str, Weight]:
    """The weights as the recipe sees them: opened ones count as dense.

    ``resident``: parameters by canonical name; otherwise tensors by published name.
    """
    weights = source.weights() if resident else source.published_weights()
    plain = source.opened() if source.is_quantized else set()
    if not choice.requantized and not plain:
        return weights
    return {
        name: (
            role,
            shape,
            OPENED_KIND if name in plain or _is_undone(choice, role, kind) else kind,
        )
        for name, (role, shape, kind) in weights.items()
    }


def change(
    choice: Choice,
    role: Role,
    planned: Planned,
    name: str,
    form: Form,
    inputs: Inputs | Prepared | None = None,
) -> Form:
    """Bring one weight into its planned form; ``inputs``: what is known of the linear's."""
    if _is_undone(choice, role, form.kind):
        form = opened(form)
    return apply(planned, name, form, inputs)


def _is_outer(weight: Weight) -> bool:
    return weight[0] in (Role.EMBEDDING, Role.HEAD)


def _must_be_opened(source: Source) -> bool:
    plain = source.opened()
    return any(
        name in plain for name, (role, _, _) in source.weights().items() if role in QUANTIZED_ROLES
    )


def _is_undone(choice: Choice, role: Role, kind: str) -> bool:
    return choice.requantized and role in QUANTIZED_ROLES and not is_dense(kind)
