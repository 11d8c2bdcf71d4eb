"""Deciding which scheme a model runs in, and what becomes of each weight in memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from llmrun.cli.source import Source, Weight, is_dense
from llmrun.errors import UnavailableError
from llmrun.kernels.forms import Form
from llmrun.quant.recipe import RESIDENT_SCHEME, Planned, apply, plan
from llmrun.quant.requantize import OPENED_KIND, opened
from llmrun.quant.roles import QUANTIZED_ROLES, Role
from llmrun.quant.scheme import Scheme, find, fitting_group

DEFAULT_SCHEME = "int4"


@dataclass(frozen=True)
class Choice:
    """The scheme weights are brought into (None: as they are stored) and what to say about it.

    ``name`` is what reports call it; ``requantized``: the source was quantized already.
    """

    scheme: Scheme | None
    name: str
    note: str
    requantized: bool = False


def choose_scheme(wanted: str, source: Source, recommended: str | None, requantize: bool) -> Choice:
    """Turn ``-q`` into a decision.

    UnavailableError for an unknown scheme, or for another scheme than a quantized source has
    without ``requantize``.
    """
    stored = source.checkpoint.quantization
    if wanted == "none" or (wanted == "auto" and stored is not None):
        how = stored or "16 bit" if wanted == "auto" else stored or "unquantized"
        return Choice(None, "none", f"weights as stored: {how}")
    if wanted == "auto":
        name = recommended or DEFAULT_SCHEME
        why = "the catalog's recommendation" if recommended else "the default"
        return Choice(find(name), name, f"scheme {name} ({why}; -q chooses another)")
    scheme = find(wanted)
    if stored is None:
        return Choice(scheme, wanted, f"scheme {wanted}")
    if _has_already(scheme, source):
        return Choice(None, wanted, f"weights as stored, which is {wanted}: {stored}")
    if not requantize:
        raise UnavailableError(
            f"the model's weights are quantized already ({stored}); making {wanted} of them "
            "would lose quality twice",
            "run it as it is (leave -q out), take the unquantized model, "
            "or accept the loss with --requantize",
        )
    return Choice(scheme, wanted, f"scheme {wanted}, made from {stored}", requantized=True)


def plan_weights(choice: Choice, source: Source, *, resident: bool) -> dict[str, Planned]:
    """What becomes of each parameter, by canonical name.

    In memory the embedding and head of a quantized model are int8, also when its linears are
    quantized in the file; ``-q none`` on an unquantized model leaves everything alone.
    """
    weights = weights_to_plan(choice, source)
    planned = plan(choice.scheme, weights, resident=resident)
    if choice.scheme is None and source.is_quantized and resident:
        outer = {n: w for n, w in weights.items() if w[0] in (Role.EMBEDDING, Role.HEAD)}
        planned |= plan(find(RESIDENT_SCHEME), outer, resident=True)
    return planned


def weights_to_plan(choice: Choice, source: Source) -> Mapping[str, Weight]:
    """The weights as the recipe sees them: opened ones count as dense."""
    weights = source.weights()
    if not choice.requantized:
        return weights
    return {
        name: (role, shape, OPENED_KIND if _is_opened(role, kind) else kind)
        for name, (role, shape, kind) in weights.items()
    }


def change(choice: Choice, role: Role, planned: Planned, name: str, form: Form) -> Form:
    """Bring one weight into its planned form."""
    if choice.requantized and _is_opened(role, form.kind):
        form = opened(form)
    return apply(planned, name, form)


def _has_already(scheme: Scheme, source: Source) -> bool:
    # A weight that no group divides is dense under the scheme, too.
    covered = [weight for weight in source.weights().values() if weight[0] in QUANTIZED_ROLES]
    return all(
        kind == scheme.kind(shape) if fitting_group(scheme.group, shape[-1]) else is_dense(kind)
        for _, shape, kind in covered
    )


def _is_opened(role: Role, kind: str) -> bool:
    return role in QUANTIZED_ROLES and not is_dense(kind)
