"""SmolLM3: Llama in which every fourth layer has no positional encoding.

Reference: ``SmolLM3ForCausalLM`` in transformers (Bakouch et al. 2025).
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import FULL, SLIDING, read_layer_types, windowed, windows_of

MODEL_TYPE = "smollm3"


def spec(config: Config) -> DecoderSpec:
    """Read a SmolLM3 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", False)
    mlp_bias = reader.flag("mlp_bias", False)
    defaults = Defaults(kv_heads=4, positions=32_768, theta=2_000_000.0, tied=True)
    result = read_spec(reader, MODEL_TYPE, defaults)
    n_layers = len(result.layers)
    every = reader.integer("no_rope_layer_interval", 4)
    rotated = reader.flags("no_rope_layers", n_layers)  # 1 where a layer does rotate
    if rotated is None:
        rotated = [(layer + 1) % every != 0 for layer in range(n_layers)]
    window = reader.optional_integer("sliding_window")
    if not reader.flag("use_sliding_window", False):
        window = None
    types = [FULL if rotates or window is None else SLIDING for rotates in rotated]
    windows = windows_of(read_layer_types(reader, types), window)
    reader.finish(HARMLESS | {"max_window_layers"})
    layers = tuple(
        layer if rotates else replace(layer, rope=None)
        for layer, rotates in zip(result.layers, rotated, strict=True)
    )
    result = replace(result, layers=layers, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    return windowed(result, windows)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    return common_config(file, MODEL_TYPE)


_SMOL = TINY | {
    "model_type": MODEL_TYPE,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("SmolLM3ForCausalLM",),
    spec=spec,
    tiny=(
        _SMOL,
        _SMOL
        | {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    gguf=GgufForm("smollm3", _gguf_config, interleaved=True),
)
