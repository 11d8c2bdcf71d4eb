"""Sliding windows per layer from the keys configs use for them."""

from llmrun.errors import ModelFileError
from llmrun.model.config import ConfigReader


def read_qwen_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """Windows of Qwen 2 and 3: layers below ``max_window_layers`` see everything.

    ``layer_types``, which newer configs also carry, must agree.
    """
    n_layers = reader.integer("num_hidden_layers")
    window = reader.optional_integer("sliding_window", 4096)
    first = reader.count("max_window_layers", 28)
    if not reader.flag("use_sliding_window", False) or window is None:
        windows: tuple[int | None, ...] = (None,) * n_layers
    else:
        windows = tuple(None if layer < first else window for layer in range(n_layers))
    types = reader.strings("layer_types")
    derived = ["full_attention" if w is None else "sliding_attention" for w in windows]
    if types and types != derived:
        raise ModelFileError(
            "the model's config has layer_types that disagree with its sliding window keys",
            "check that config.json is the publisher's own",
        )
    return windows
