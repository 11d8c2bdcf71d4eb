"""Granite 3: Llama with multipliers on embedding, attention, residuals and logits.

Reference: ``GraniteForCausalLM`` in transformers (Granite Team 2024). GGUF files of this name hold
dense Granite 4 models, too.
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config, head_dim_of
from llmrun.model.granite_family import MULTIPLIER_KEYS, SCALED, read_granite
from llmrun.model.llama_family import TINY
from llmrun.model.spec import DecoderSpec

MODEL_TYPE = "granite"


def spec(config: Config) -> DecoderSpec:
    """Read a Granite config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    mlp_bias = reader.flag("mlp_bias", False)
    result = read_granite(reader, MODEL_TYPE)
    reader.finish(HARMLESS)
    return replace(result, mlp_bias=mlp_bias)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    file.expect("rope.scaling.finetuned", True)  # False would mean: no rotation at all
    file.expect("expert_count", 0)
    file.expect("expert_used_count", 0)
    for key in _OF_OTHER_LAYERS:
        file.take(key)
    kv_heads = config.get("num_key_value_heads")
    if isinstance(kv_heads, list) and len(set(kv_heads)) == 1:  # one for each layer
        config["num_key_value_heads"] = kv_heads[0]
    config["attention_multiplier"] = head_dim_of(config) ** -0.5  # unless the file says another
    file.move(config, MULTIPLIER_KEYS)
    return config


_OF_OTHER_LAYERS = (
    "expert_shared_feed_forward_length",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)
"""Sizes of layers that dense Granite 4 does not have, but its converter writes."""

_GRANITE = TINY | {"model_type": MODEL_TYPE} | SCALED

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("GraniteForCausalLM",),
    spec=spec,
    tiny=(
        _GRANITE,
        _GRANITE
        | {
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.3,
        },
    ),
    gguf=GgufForm("granite", _gguf_config, interleaved=True),
)
