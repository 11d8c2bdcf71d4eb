"""Rotary frequencies from a config: the default formula and Llama 3's scaling.

Formulas: Su et al. 2021 (RoFormer) for the base frequencies; Llama 3.1's published code for the
``llama3`` scaling. Frequencies are rounded to fp32 as the publishers compute them.
"""

import math
import struct

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Rope
from llmrun.model.config import ConfigReader

DEFAULT_THETA = 10_000.0


def read_rope(config: ConfigReader, rotated_dims: int) -> Rope:
    """Build the rotation of ``rotated_dims`` dimensions from either of the two config layouts.

    ``rope_theta`` with ``rope_scaling``, or ``rope_parameters`` that holds both.
    """
    theta = config.number("rope_theta", DEFAULT_THETA)
    read = [
        _read_section(section, theta, rotated_dims)
        for section in (config.section("rope_scaling"), config.section("rope_parameters"))
        if section is not None
    ]
    if len(set(read)) > 1:
        raise ModelFileError(
            "the model's config has both rope_scaling and rope_parameters, and they differ",
            "check that config.json is the publisher's own",
        )
    return Rope(read[0] if read else _base(theta, rotated_dims))


def llama3_parameters(theta: float, scaled: tuple[float, ...]) -> dict[str, object] | None:
    """The published ``llama3`` parameters that scale the base frequencies to these, or None.

    Files that carry the scaled frequencies themselves leave the parameters out; all published
    models of this kind differ in the factor only.
    """
    base = _base(theta, 2 * len(scaled))
    parameters: dict[str, object] = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(round(base[-1] / scaled[-1])),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tried = _read_section(ConfigReader(parameters), theta, 2 * len(scaled))
    close = all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(tried, scaled, strict=True))
    return parameters if close else None


def _read_section(section: ConfigReader, theta: float, dims: int) -> tuple[float, ...]:
    frequencies = _base(section.number("rope_theta", theta), dims)
    kind = section.string("rope_type", section.string("type", "default"))
    if kind == "llama3":
        frequencies = _llama3(frequencies, section)
    elif kind != "default":
        raise ModelFileError(
            f"the model scales its rotary embedding by {kind!r}",
            "this llmrun supports the types default and llama3",
        )
    section.finish()
    return frequencies


def _base(theta: float, dims: int) -> tuple[float, ...]:
    return tuple(_f32(1.0 / _f32(theta ** _f32(i / dims))) for i in range(0, dims, 2))


def _llama3(frequencies: tuple[float, ...], section: ConfigReader) -> tuple[float, ...]:
    factor = section.number("factor")
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    original = section.integer("original_max_position_embeddings")
    scaled = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            scaled.append(_f32(frequency / factor))
        elif wavelength < original / high:
            scaled.append(frequency)
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled.append(_f32((1 - smooth) * frequency / factor + smooth * frequency))
    return tuple(scaled)


def _f32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
