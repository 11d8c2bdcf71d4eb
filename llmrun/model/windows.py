"""Kinds of layers: sliding windows from the keys configs use for them."""

from collections.abc import Sequence
from dataclasses import replace

from llmrun.errors import ModelFileError
from llmrun.model.config import ConfigReader
from llmrun.model.spec import DecoderSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def windowed(spec: DecoderSpec, windows: Sequence[int | None]) -> DecoderSpec:
    """The spec with a window for each of its layers."""
    layers = (
        replace(layer, window=window) for layer, window in zip(spec.layers, windows, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def read_layer_types(reader: ConfigReader, derived: Sequence[str]) -> list[str]:
    """``layer_types`` of a config, or what an architecture derives from its other keys.

    ModelFileError for another number of layers, or for a type other than the two above.
    """
    types = reader.strings("layer_types") or list(derived)
    strange = sorted(set(types) - {FULL, SLIDING})
    if strange or len(types) != len(derived):
        raise ModelFileError(
            f"the model's config has {len(types)} layer_types for {len(derived)} layers"
            if not strange
            else f"the model's config has layers of the type {strange[0]!r}",
            f"llmrun supports {FULL} and {SLIDING}, one for each layer",
        )
    return types


def every_nth_full(n_layers: int, pattern: int) -> list[str]:
    """Types of layers of which every ``pattern``-th sees everything."""
    return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(n_layers)]


def windows_of(types: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer: ``window`` where it is sliding."""
    return [window if kind == SLIDING else None for kind in types]


def unrotated_where_full(spec: DecoderSpec) -> DecoderSpec:
    """The spec without positions in the layers that see everything."""
    layers = (layer if layer.window else replace(layer, rope=None) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def read_qwen_windows(reader: ConfigReader) -> list[int | None]:
    """Windows of Qwen 2 and 3: layers below ``max_window_layers`` see everything.

    ``layer_types``, which newer configs also carry, must agree.
    """
    n_layers = reader.integer("num_hidden_layers")
    window = reader.optional_integer("sliding_window", 4096)
    first = reader.count("max_window_layers", 28)
    if not reader.flag("use_sliding_window", False) or window is None:
        windows: list[int | None] = [None] * n_layers
    else:
        windows = [None if layer < first else window for layer in range(n_layers)]
    derived = [FULL if w is None else SLIDING for w in windows]
    if read_layer_types(reader, derived) != derived:
        raise ModelFileError(
            "the model's config has layer_types that disagree with its sliding window keys",
            "check that config.json is the publisher's own",
        )
    return windows
