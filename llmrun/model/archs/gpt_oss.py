"""gpt-oss 20B and 120B: attention sinks, alternating windows, and experts with biases.

Reference: ``GptOssForCausalLM`` in transformers (OpenAI 2025). Experts have a clamped SwiGLU. Their
matrices lie in stacks with gate and up woven: transposed if the numbers are plain, as rows of
output features if they are MXFP4 (tensors ``..._blocks``).
"""

from dataclasses import replace

from llmrun.kernels.ops import CLAMP, CLAMP_SLOPE
from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.layout import Layout, Place
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.mixture import (
    MIXTURE_HARMLESS,
    TINY_MIXTURE,
    MixtureDefaults,
    mixture_config,
    read_mixture,
    same_width,
    with_mixture,
)
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import FULL, SLIDING, read_layer_types, windowed, windows_of

MODEL_TYPE = "gpt_oss"
_DEFAULTS = Defaults(kv_heads=8, head_dim=64, positions=131_072, theta=150_000.0, eps=1e-5)

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation of configs that do not say, as in the reference."""

_HARMLESS = MIXTURE_HARMLESS | {"initial_context_length"}  # repeats what the rotation says


def spec(config: Config) -> DecoderSpec:
    """Read a gpt-oss config. ModelFileError names what is not supported."""
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_parameters": _YARN}
    reader = ConfigReader(config)
    reader.pinned("swiglu_limit", CLAMP)
    reader.pinned("swiglu_alpha", CLAMP_SLOPE)
    bias = reader.flag("attention_bias", True)
    window = reader.optional_integer("sliding_window", 128)
    dense = read_spec(reader, MODEL_TYPE, _DEFAULTS)
    alternating = [FULL if layer % 2 else SLIDING for layer in range(len(dense.layers))]
    types = read_layer_types(reader, alternating)
    mixture = read_mixture(reader, dense.intermediate, MixtureDefaults(128, 4), normalize=True)
    reader.pinned("experts_per_token", mixture.top_k)
    reader.finish(_HARMLESS)
    biased = replace(mixture, router_bias=True, bias=True)
    return replace(
        windowed(with_mixture(dense, biased), windows_of(types, window)),
        activation="swiglu_clamped",
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
    )


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    mixture_config(file, config, normalize=True)
    same_width(file, config)
    file.move(config, {"attention.sliding_window": "sliding_window"})
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        rope["truncate"] = False  # as published; files do not say
    return config


def _woven(kind: str, *, transposed: bool = False) -> Place:
    parts = tuple(f"mlp.experts.*.{name}_proj.{kind}" for name in ("gate", "up"))
    return Place(parts, woven=True, stacked=True, transposed=transposed)


def _down(kind: str, *, transposed: bool = False) -> Place:
    return Place((f"mlp.experts.*.down_proj.{kind}",), stacked=True, transposed=transposed)


_GPT_OSS = (
    TINY
    | TINY_MIXTURE
    | {
        "model_type": MODEL_TYPE,
        "num_local_experts": 4,
        "head_dim": 32,
        "sliding_window": 20,
        "layer_types": None,
    }
)

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("GptOssForCausalLM",),
    spec=spec,
    tiny=(
        _GPT_OSS
        | {
            "num_hidden_layers": 3,
            "rope_parameters": _YARN
            | {"rope_theta": 150_000.0, "original_max_position_embeddings": 16},
        },
        _GPT_OSS
        | {
            "intermediate_size": 64,
            "layer_types": [FULL, SLIDING],
            "num_experts_per_tok": 3,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    layout=Layout(
        places={
            "mlp.router": Place(("mlp.gate",)),
            "mlp.experts.gate_up_proj": _woven("weight", transposed=True),
            "mlp.experts.gate_up_proj_blocks": _woven("weight"),
            "mlp.experts.gate_up_proj_bias": _woven("bias"),
            "mlp.experts.down_proj": _down("weight", transposed=True),
            "mlp.experts.down_proj_blocks": _down("weight"),
            "mlp.experts.down_proj_bias": _down("bias"),
        }
    ),
    gguf=GgufForm(
        "gpt-oss",
        _gguf_config,
        names={"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    ),
)
