"""Llama 2 and 3, SmolLM2, TinyLlama and other models of the Llama architecture.

Pre-norm decoder with RMSNorm, grouped-query attention, rotary embedding and a gated SiLU MLP
(Touvron et al. 2023; reference: ``LlamaForCausalLM`` in transformers).
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.llama_family import TINY, read_spec
from llmrun.model.spec import DecoderSpec

MODEL_TYPE = "llama"


def spec(config: Config) -> DecoderSpec:
    """Read a Llama config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", False)
    mlp_bias = reader.flag("mlp_bias", False)
    reader.pinned("rope_interleaved", False)
    result = read_spec(reader, MODEL_TYPE)
    reader.finish(HARMLESS)
    return replace(result, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    if "blk.0.attn_q.bias" in file.shapes:
        config["attention_bias"] = True
    file.expect("expert_count", 0)
    file.expect("expert_used_count", 0)
    return config


def _is_dense(metadata: Config) -> bool:
    return not metadata.get("llama.expert_count")


_LLAMA = TINY | {"model_type": MODEL_TYPE}


def _rotated(rope_type: str, **numbers: object) -> dict[str, object]:
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0}
    return _LLAMA | {"num_hidden_layers": 1, "rope_parameters": rope | numbers}


_SHORT = [1.0, 1.1, 1.3, 1.7, 2.2, 2.9, 3.5, 4.1]

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("LlamaForCausalLM",),
    spec=spec,
    tiny=(
        _LLAMA,
        _LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        _LLAMA | {"head_dim": 24, "num_key_value_heads": 1},
        _rotated(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        _rotated("linear", factor=4.0),
        _rotated("dynamic", factor=2.0),
        _rotated("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0),
        _rotated(
            "yarn",
            factor=2.0,
            original_max_position_embeddings=32,
            attention_factor=0.8,
            truncate=False,
        ),
        _rotated(
            "longrope",
            factor=2.0,
            original_max_position_embeddings=32,
            short_factor=_SHORT,
            long_factor=[8 * factor for factor in _SHORT],
        ),
    ),
    gguf=GgufForm("llama", _gguf_config, interleaved=True, applies=_is_dense),
)
