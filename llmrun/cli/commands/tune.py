"""``llmrun tune``: find the fastest launches of a model's linears on this GPU, and keep them."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.options import (
    GeneralOptions,
    Json,
    ModelArgument,
    ModelOptions,
    one_model,
    spread,
)
from llmrun.cli.session import Session
from llmrun.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from llmrun.kernels.gpu.arrays import GpuWeight
    from llmrun.kernels.gpu.tuning import Found
    from llmrun.kernels.ops import Linear
    from llmrun.model.decoder import Decoder


@spread
def command(
    context: typer.Context,
    named: ModelArgument = None,
    *,
    clear: Annotated[
        bool, typer.Option("--clear", help="Only forget what was measured on this card.")
    ] = False,
    as_json: Json = False,
    model: ModelOptions,
    general: GeneralOptions,
) -> None:
    """Find the fastest kernel launches for a model on this GPU.

    At most 15 are tried for each shape of a linear. What is found is kept for all later runs on
    cards of this name. All of the model must fit on the GPU, so --offload is refused.
    """
    from llmrun.cli.loading import load
    from llmrun.cli.progress import activity
    from llmrun.cli.tuned import forget, keep

    session: Session = context.obj.with_options(general)
    if model.offload:
        raise UsageError(
            "Launches are measured on a model that lies on the GPU as a whole, which --offload "
            "does not promise.",
            "Leave --offload out; a smaller --ctx or fewer bits (-q int4) may make the model fit.",
        )
    device = "cuda" if model.device == "auto" else model.device
    _check_gpu(device)
    if clear:
        session.say(forget(session.settings, device))
        return
    name = session.model(one_model(named, model.model))
    loaded = load(session, name, replace(model, device=device))
    with activity(session, f"measuring on {device} ..."):
        found = _measure(loaded.decoder)
    path = keep(session.settings, device, {one.key: one.launch for one in found})
    _show(session, found, str(path), as_json)


def _check_gpu(device: str) -> None:
    """UnavailableError, with the reason, if our GPU kernels do not serve a device."""
    from llmrun.kernels import dispatch

    asked = next(one for one in dispatch.candidates(device) if one.info.name == "gpu")
    if asked.reason is not None:
        raise UnavailableError(
            f"Launches are tuned on a GPU, and {device} cannot be used: {asked.reason}.",
            "See `llmrun doctor` for what this machine offers.",
        )


def _measure(decoder: "Decoder") -> "list[Found]":
    from llmrun.kernels.gpu.tuning import groups, measured

    launches = []
    for linears in decoder.launches:
        launches += groups([_weight(linear) for linear in linears])
    return list(measured(launches))


def _weight(linear: "Linear") -> "GpuWeight":
    from llmrun.kernels.gpu.arrays import GpuWeight

    assert isinstance(linear.weight, GpuWeight)  # without --offload, all of a model is on the GPU
    return linear.weight


def _show(session: Session, found: "list[Found]", path: str, as_json: bool) -> None:
    from llmrun.cli.tables import show_json, show_table

    if as_json:
        show_json(session, {"file": path, "launches": [_facts(one) for one in found]})
        return
    rows = []
    for one in found:
        shape, launch = one.shape, one.launch
        rows.append(
            (
                f"{shape.n} x {shape.k}{' x 2' if shape.pair else ''}",
                f"{shape.form} g{shape.group}" if shape.group else shape.form,
                f"{one.rule_seconds * 1e6:.1f}",
                f"{one.seconds * 1e6:.1f}",
                str(one.tried),
                f"{launch.splits} parts, {launch.warps} warps, {launch.stages[0]} stages",
            )
        )
    show_table(session, ("SHAPE", "FORM", "BEFORE US", "AFTER US", "TRIED", "LAUNCH"), rows)
    session.say(f"kept in {path}")


def _facts(one: "Found") -> dict[str, object]:
    from dataclasses import asdict

    return {
        "sm": one.card.sm,
        **asdict(one.shape),
        **asdict(one.launch),
        "us": one.seconds * 1e6,
        "us_before": one.rule_seconds * 1e6,
        "tried": one.tried,
    }
