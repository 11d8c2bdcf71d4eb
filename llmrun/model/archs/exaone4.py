"""EXAONE 4: norms behind attention and MLP, norms per head, no rotation where a layer sees all.

Layers with a sliding window are rotated; full ones only if the model has no window anywhere.
Reference: ``Exaone4ForCausalLM`` in transformers (LG AI Research 2025).
"""

from collections.abc import Sequence
from dataclasses import replace

from llmrun.errors import ModelFileError
from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.archs.olmo2 import POST_NORM_NAMES, POST_NORMS
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config, read_windows
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import (
    FULL,
    SLIDING,
    every_nth_full,
    read_layer_types,
    unrotated_where_full,
    windowed,
    windows_of,
)

MODEL_TYPE = "exaone4"


def spec(config: Config) -> DecoderSpec:
    """Read an EXAONE 4 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    result = read_spec(reader, MODEL_TYPE, Defaults(kv_heads=32, eps=1e-5))
    window = reader.optional_integer("sliding_window", 4096)
    types = read_layer_types(reader, _derived_types(reader, config, len(result.layers)))
    result = windowed(result, windows_of(types, window))
    if window is not None:
        result = unrotated_where_full(result)
    reader.finish(HARMLESS | {"attn_implementation"})
    norm = replace(result.norm, before=False, after=True)
    return replace(result, norm=norm, qk_norm="head")


def _derived_types(reader: ConfigReader, config: Config, n_layers: int) -> Sequence[str]:
    """The types a pattern stands for: a number, or letters L and G with the last layer full."""
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        letters = reader.string("sliding_window_pattern")
        if not letters or set(letters) - set("LG"):
            raise ModelFileError(
                f"the model's config says sliding_window_pattern = {letters!r}",
                "llmrun supports a number, or the letters L and G",
            )
        local = [letters[layer % len(letters)] == "L" for layer in range(n_layers - 1)]
        return [*(SLIDING if is_local else FULL for is_local in local), FULL]
    every = reader.count("sliding_window_pattern", 4)  # 0: the library's word for no window
    return every_nth_full(n_layers, every) if every else [FULL] * n_layers


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    return config | read_windows(file, config, pattern=4)


_EXAONE4 = TINY | {"model_type": MODEL_TYPE}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Exaone4ForCausalLM",),
    spec=spec,
    tiny=(
        _EXAONE4
        | {"num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": 4}
        | {"head_dim": 32},
        _EXAONE4
        | {
            "sliding_window": None,
            "layer_types": [FULL, FULL],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    layout=POST_NORMS,
    gguf=GgufForm("exaone4", _gguf_config, names=POST_NORM_NAMES),
)
