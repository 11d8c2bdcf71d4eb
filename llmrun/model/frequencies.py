"""Rotary frequencies: the base formula and the published ways of stretching it.

Each function gives the frequencies (radians per token) of ``dims / 2`` rotated pairs, rounded to
fp32 where the publishers' code rounds. Sources: Su et al. 2021 (RoFormer) for the base; linear
interpolation, Chen et al. 2023; NTK-aware scaling, as the transformers library applies it by
length; YaRN, Peng et al. 2023; LongRoPE, Ding et al. 2024; Llama 3.1's published code.
"""

import math
import struct
from collections.abc import Sequence

Frequencies = tuple[float, ...]


def base(theta: float, dims: int) -> Frequencies:
    """``theta ** (-i / dims)`` for even i."""
    return tuple(f32(1.0 / f32(theta ** f32(i / dims))) for i in range(0, dims, 2))


def linear(theta: float, dims: int, factor: float) -> Frequencies:
    """All positions divided by ``factor``."""
    return tuple(f32(frequency / factor) for frequency in base(theta, dims))


def divided(theta: float, dims: int, factors: Sequence[float]) -> Frequencies:
    """Each frequency divided by a factor of its own (LongRoPE)."""
    wavelengths = (f32(theta ** f32(i / dims)) for i in range(0, dims, 2))
    return tuple(f32(1.0 / f32(f32(f) * w)) for f, w in zip(factors, wavelengths, strict=True))


def ntk(theta: float, dims: int, factor: float, length: int, original: int) -> Frequencies:
    """A larger theta for sequences of ``length`` tokens, longer than the ``original``."""
    grown = factor * length / original - (factor - 1)
    return base(theta * grown ** (dims / (dims - 2)), dims)


def yarn(
    theta: float,
    dims: int,
    factor: float,
    original: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Frequencies:
    """Pairs that turn often are kept, slow ones divided by ``factor``, a ramp between them.

    The ramp goes from the pair that turns ``beta_fast`` times within the ``original`` context to
    the one that turns ``beta_slow`` times; ``truncate`` widens it to whole pairs.
    """

    def pair_turning(times: float) -> float:
        return dims * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(beta_fast), pair_turning(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    span = high - low or 0.001
    frequencies = []
    for pair, frequency in enumerate(base(theta, dims)):
        slowed = f32(min(max((pair - low) / span, 0.0), 1.0))
        frequencies.append(f32(frequency / factor * slowed + frequency * (1 - slowed)))
    return tuple(frequencies)


def llama3(
    theta: float, dims: int, factor: float, low_factor: float, high_factor: float, original: int
) -> Frequencies:
    """Long wavelengths divided by ``factor``, short ones kept, a ramp between them."""
    scaled = []
    for frequency in base(theta, dims):
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low_factor:
            scaled.append(f32(frequency / factor))
        elif wavelength < original / high_factor:
            scaled.append(frequency)
        else:
            smooth = (original / wavelength - low_factor) / (high_factor - low_factor)
            scaled.append(f32((1 - smooth) * frequency / factor + smooth * frequency))
    return tuple(scaled)


def f32(value: float) -> float:
    """The nearest number fp32 holds."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
