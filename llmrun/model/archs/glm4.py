"""GLM 4 of 2025 (GLM-4-9B-0414, GLM-Z1): norms around attention and MLP, half-rotated heads.

Reference: ``Glm4ForCausalLM`` in transformers. Rotary pairs are next to each other; only query,
key and value may have biases.
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.layout import Layout, Place
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec

MODEL_TYPE = "glm4"
PARTIAL = "partial_rotary_factor"


def spec(config: Config) -> DecoderSpec:
    """Read a GLM 4 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", True)
    defaults = Defaults(kv_heads=2, head_dim=128, positions=131_072, partial=0.5, eps=1.5625e-7)
    result = read_spec(reader, MODEL_TYPE, defaults)
    reader.finish(HARMLESS)
    return replace(result, norm=replace(result.norm, after=True), qkv_bias=bias)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = {PARTIAL: 1.0} | common_config(file, MODEL_TYPE)
    return config | {"attention_bias": "blk.0.attn_q.bias" in file.shapes}


_GLM4 = TINY | {"model_type": MODEL_TYPE, "head_dim": 16, "pad_token_id": 0}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Glm4ForCausalLM",),
    spec=spec,
    tiny=(
        _GLM4,
        _GLM4
        | {
            "head_dim": 24,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, PARTIAL: 1.0},
        },
    ),
    layout=Layout(
        {"mlp.gate_up_proj": Place(("mlp.gate_proj", "mlp.up_proj"))},
        paired=True,
    ),
    gguf=GgufForm(
        "glm4",
        _gguf_config,
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
)
