"""Command R7B, Command A, Tiny Aya and other models of Cohere's second architecture.

Attention and MLP read one LayerNorm and are added together; layers with a sliding window are
rotated (pairs next to each other), the others have no positional encoding. Reference:
``Cohere2ForCausalLM`` in transformers.
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config, read_windows
from llmrun.model.layout import Layout
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

MODEL_TYPE = "cohere2"


def spec(config: Config) -> DecoderSpec:
    """Read a Cohere 2 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    _check_block(reader)
    bias = reader.flag("attention_bias", False)
    defaults = Defaults(positions=8192, eps=1e-5, eps_key="layer_norm_eps", tied=True)
    result = read_spec(reader, MODEL_TYPE, defaults)
    pattern = reader.integer("sliding_window_pattern", 4)
    reader.pinned("layer_switch", pattern)
    types = read_layer_types(reader, every_nth_full(len(result.layers), pattern))
    result = windowed(result, windows_of(types, reader.optional_integer("sliding_window", 4096)))
    result = unrotated_where_full(result)
    scale = reader.number("logit_scale", 0.0625)
    reader.finish(HARMLESS | {"use_parallel_embedding", "model_max_length"})
    return replace(
        result,
        norm=replace(result.norm, centered=True),
        parallel=True,
        qkv_bias=bias,
        output_bias=bias,
        logit_scale=scale,
    )


def _check_block(reader: ConfigReader) -> None:
    """The publisher's own keys, each with the one value that this architecture means."""
    reader.pinned("order_of_interleaved_layers", "local_attn_first")
    reader.pinned("position_embedding_type", "rope_gptj")
    reader.pinned("rotary_pct", 1.0)
    reader.pinned("use_qk_norm", False)
    for key in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        reader.pinned(key, True)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    config |= read_windows(file, config, pattern=4)
    file.move(
        config, {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
    )
    return config


_COHERE2 = {key: value for key, value in TINY.items() if key != "rms_norm_eps"} | {
    "model_type": MODEL_TYPE,
    "sliding_window": 20,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Cohere2ForCausalLM",),
    spec=spec,
    tiny=(
        _COHERE2 | {"num_hidden_layers": 4},
        _COHERE2
        | {
            "layer_types": [FULL, SLIDING],
            "attention_bias": True,
            "logit_scale": 0.25,
            "num_key_value_heads": 4,
        },
    ),
    layout=Layout(paired=True),
    gguf=GgufForm("cohere2", _gguf_config),
)
