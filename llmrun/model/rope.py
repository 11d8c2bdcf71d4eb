"""Rotary embeddings from a config: which formula, with which numbers.

Configs hold them as ``rope_theta`` with ``rope_scaling``, or as ``rope_parameters`` with both,
perhaps one for each type of layer. Unknown types and keys are refused by name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Rope
from llmrun.model import frequencies
from llmrun.model.config import LIMITS, ConfigReader
from llmrun.model.spec import RopeByLength

DEFAULT_THETA = 10_000.0

NTK_STEPS = 8
"""Dynamic NTK changes with every token beyond the trained length, which would mean to compute all
keys anew each time. Lengths are rounded up to so many steps per trained length instead."""

NTK_REACH = 16
"""Trained lengths that dynamic NTK is prepared for; beyond, it stays as it is there."""


@dataclass(frozen=True)
class Sizes:
    """What formulas need besides the parameters: rotated dimensions, and the model's context."""

    dims: int
    positions: int


def read_rope(
    config: ConfigReader,
    head_dim: int,
    positions: int,
    *,
    theta: float = DEFAULT_THETA,
    partial: float | None = None,
    layer_type: str | None = None,
) -> Rope | RopeByLength:
    """Build the rotation of a model with heads of ``head_dim`` and a context of ``positions``.

    ``theta`` and ``partial`` (the rotated share of a head) are what the architecture takes when
    the config does not say; ``partial`` None: it rotates whole heads, whatever a config says, so
    none may say anything else. ``layer_type`` picks one of several rotations.
    """
    theta = config.number("rope_theta", theta)
    partial = _share(config, partial)
    original = config.optional_integer("original_max_position_embeddings")
    read = [
        _read_section(section, head_dim, positions, theta, partial, original)
        for name in ("rope_scaling", "rope_parameters")
        if (section := _section(config, name, layer_type)) is not None
    ]
    if len(set(read)) > 1:
        raise ModelFileError(
            "the model's config has both rope_scaling and rope_parameters, and they differ",
            "check that config.json is the publisher's own",
        )
    dims = rotated_dims(head_dim, partial or 1.0)
    return read[0] if read else Rope(frequencies.base(theta, dims))


def stretched_positions(config: ConfigReader, positions: int) -> int:
    """The context that a scaled rotation reaches, where configs name the shorter one before it."""
    reached = positions
    for name in ("rope_scaling", "rope_parameters"):
        section = config.section(name)
        if section is None:
            continue
        factor = section.optional_number("factor") or 1.0
        kind = section.string("rope_type", section.string("type", "default"))
        if kind == "yarn":
            original = section.optional_integer("original_max_position_embeddings") or positions
            reached = max(reached, int(factor * original))
        elif kind == "dynamic":
            reached = max(reached, int(factor * positions))
    return min(reached, LIMITS["max_position_embeddings"])


def has_rope_per_layer_type(config: ConfigReader) -> bool:
    """Whether ``rope_parameters`` holds one rotation for each type of layer."""
    section = config.section("rope_parameters")
    return section is not None and section.section("full_attention") is not None


def _share(config: ConfigReader, partial: float | None) -> float | None:
    if partial is not None:
        return config.number("partial_rotary_factor", partial)
    config.pinned("partial_rotary_factor", 1.0)
    return None


def rotated_dims(head_dim: int, partial: float) -> int:
    """Dimensions that are rotated, a share of a head. ModelFileError unless even and within it."""
    dims = int(head_dim * partial)
    if not 2 <= dims <= head_dim or dims % 2:
        raise ModelFileError(
            f"the model rotates {dims} dimensions of heads of {head_dim}",
            "check that config.json is the publisher's own",
        )
    return dims


def llama3_parameters(theta: float, factors: tuple[float, ...]) -> dict[str, object] | None:
    """The published ``llama3`` parameters that divide the base frequencies by these, or None.

    Files that carry the factors themselves leave the parameters out; all published models of
    this kind differ in the largest factor only.
    """
    dims = 2 * len(factors)
    numbers = {
        "factor": float(round(factors[-1])),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if numbers["factor"] < 1.0:
        return None
    tried = frequencies.llama3(theta, dims, numbers["factor"], 1.0, 4.0, 8192)
    scaled = (f / d for f, d in zip(frequencies.base(theta, dims), factors, strict=True))
    close = all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(tried, scaled, strict=True))
    return {"rope_type": "llama3", "rope_theta": theta, **numbers} if close else None


def _section(config: ConfigReader, name: str, layer_type: str | None) -> ConfigReader | None:
    section = config.section(name)
    if section is None or layer_type is None:
        return section
    own = section.section(layer_type)
    if own is None:
        return section
    for other in ("full_attention", "sliding_attention"):
        section.section(other)
    section.finish()
    return own


def _read_section(
    section: ConfigReader,
    head_dim: int,
    positions: int,
    theta: float,
    partial: float | None,
    original: int | None,
) -> Rope | RopeByLength:
    theta = section.number("rope_theta", theta)
    dims = rotated_dims(head_dim, _share(section, partial) or 1.0)
    kind = section.string("type", "default")
    kind = section.string("rope_type", kind)
    if kind not in _TYPES:
        raise ModelFileError(
            f"the model scales its rotary embedding by {kind!r}",
            f"this llmrun supports the types {', '.join(_TYPES)}",
        )
    # Where both are given, the one beside the section counts, as the publishers' code has it.
    inner = section.optional_integer("original_max_position_embeddings")
    try:
        rope = _TYPES[kind](section, theta, Sizes(dims, positions), original or inner or positions)
    except (ArithmeticError, ValueError) as error:  # numbers that are in range one by one
        raise ModelFileError(
            f"the numbers of the model's {kind} rotary embedding give no frequencies: {error}",
            "check that config.json is the publisher's own",
        ) from error
    section.finish()
    return rope


Formula = Callable[[ConfigReader, float, Sizes, int], Rope | RopeByLength]


def _default(section: ConfigReader, theta: float, sizes: Sizes, original: int) -> Rope:
    return Rope(frequencies.base(theta, sizes.dims))


def _linear(section: ConfigReader, theta: float, sizes: Sizes, original: int) -> Rope:
    return Rope(frequencies.linear(theta, sizes.dims, section.number("factor")))


def _divided(section: ConfigReader, theta: float, sizes: Sizes, original: int) -> Rope:
    """Frequencies that no config publishes, only a GGUF file (see ``model.gguf``)."""
    factors = section.numbers("factors", sizes.dims // 2)
    base = frequencies.base(theta, sizes.dims)
    return Rope(tuple(f / d for f, d in zip(base, factors, strict=True)))


def _dynamic(section: ConfigReader, theta: float, sizes: Sizes, original: int) -> RopeByLength:
    # The trained length is the config's context here, whatever else is named beside it.
    trained, factor = sizes.positions, section.number("factor")
    step = max(1, trained // NTK_STEPS)
    lengths = range(trained + step, NTK_REACH * trained + 1, step)
    stretched = [frequencies.ntk(theta, sizes.dims, factor, n, trained) for n in lengths]
    ropes = [Rope(frequencies.base(theta, sizes.dims)), *map(Rope, stretched)]
    return RopeByLength((trained, *lengths[:-1]), tuple(ropes))


def _yarn(section: ConfigReader, theta: float, sizes: Sizes, original: int) -> Rope:
    factor = section.optional_number("factor") or sizes.positions / original
    attention = section.optional_number("attention_factor")
    mscale = section.optional_number("mscale")
    all_dims = section.optional_number("mscale_all_dim")
    if attention is None and mscale and all_dims:
        attention = _temperature(factor, mscale) / _temperature(factor, all_dims)
    stretched = frequencies.yarn(
        theta,
        sizes.dims,
        factor,
        original,
        section.number("beta_fast", 32.0),
        section.number("beta_slow", 1.0),
        section.flag("truncate", True),
    )
    return Rope(stretched, _temperature(factor, 1.0) if attention is None else attention)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(section: ConfigReader, theta: float, sizes: Sizes, original: int) -> RopeByLength:
    factor = section.optional_number("factor") or sizes.positions / original
    attention = section.optional_number("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (
        Rope(
            frequencies.divided(theta, sizes.dims, section.numbers(key, sizes.dims // 2)), attention
        )
        for key in ("short_factor", "long_factor")
    )
    return RopeByLength((original,), (short, long))


def _llama3(section: ConfigReader, theta: float, sizes: Sizes, original: int) -> Rope:
    return Rope(
        frequencies.llama3(
            theta,
            sizes.dims,
            section.number("factor"),
            section.number("low_freq_factor"),
            section.number("high_freq_factor"),
            original,
        )
    )


_TYPES: dict[str, Formula] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in the first Phi 3 configs
    "llama3": _llama3,
    "divided": _divided,
}
