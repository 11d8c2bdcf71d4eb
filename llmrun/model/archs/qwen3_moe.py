"""Qwen 3 with experts (30B-A3B, 235B-A22B, Coder): Qwen 3 whose MLPs are mixtures of small experts.

Reference: ``Qwen3MoeForCausalLM`` in transformers (Yang et al. 2025). Some layers may keep a dense
MLP, of a width of its own.
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.layout import Layout
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.mixture import (
    MIXTURE_HARMLESS,
    STACKED,
    TINY_MIXTURE,
    MixtureDefaults,
    mixture_config,
    read_mixture,
    with_mixture,
)
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import windowed

MODEL_TYPE = "qwen3_moe"


def spec(config: Config) -> DecoderSpec:
    """Read a Qwen 3 MoE config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", False)
    window = reader.optional_integer("sliding_window", 4096)
    if not reader.flag("use_sliding_window", False):
        window = None
        reader.count("max_window_layers", 0)  # older configs: which layers the window is for
    dense = read_spec(reader, MODEL_TYPE, Defaults(kv_heads=4, positions=32_768))
    width = reader.integer("moe_intermediate_size", 768)
    normalize = reader.flag("norm_topk_prob", False)
    mixture = read_mixture(reader, width, MixtureDefaults(128, 8), normalize=normalize)
    n_layers = len(dense.layers)
    step = reader.integer("decoder_sparse_step", 1)
    without = {layer for layer in range(n_layers) if (layer + 1) % step}
    without.update(reader.counts("mlp_only_layers"))
    reader.pinned("qkv_bias", False)  # this and the next two: in the Coder models' configs
    reader.pinned("use_qk_norm", True)
    reader.pinned("shared_expert_intermediate_size", 0)
    reader.finish(MIXTURE_HARMLESS)
    result = windowed(with_mixture(dense, mixture, without), [window] * n_layers)
    return replace(result, qkv_bias=bias, output_bias=bias, qk_norm="head")


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    mixture_config(file, config, normalize=True)
    file.move(config, {"expert_feed_forward_length": "moe_intermediate_size"})
    return config | {"norm_topk_prob": True}


_QWEN3_MOE = (
    TINY
    | TINY_MIXTURE
    | {
        "model_type": MODEL_TYPE,
        "head_dim": 32,
        "num_experts": 6,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
)

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Qwen3MoeForCausalLM",),
    spec=spec,
    tiny=(
        _QWEN3_MOE,
        _QWEN3_MOE
        | {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 128,
            "intermediate_size": 32,
            "norm_topk_prob": False,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "tie_word_embeddings": True,
        },
    ),
    layout=Layout(places=STACKED),
    gguf=GgufForm("qwen3moe", _gguf_config),
)
