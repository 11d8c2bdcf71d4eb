"""Granite 3 with experts (1B-A400M, 3B-A800M): Llama with constant multipliers and a mixture.

Reference: ``GraniteMoeForCausalLM`` in transformers. The router takes a softmax over the chosen
logits, which is the softmax over all divided by the sum of the chosen.
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.layout import Layout, Place
from llmrun.model.llama_family import TINY, read_spec
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

MODEL_TYPE = "granitemoe"

_GATE_UP = ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj")
_DOWN = ("mlp.experts.*.down_proj",)


def spec(config: Config) -> DecoderSpec:
    """Read a Granite MoE config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", False)
    dense = read_spec(reader, MODEL_TYPE)
    mixture = read_mixture(reader, dense.intermediate, MixtureDefaults(8, 2), normalize=True)
    scaled = replace(
        with_mixture(dense, mixture),
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=reader.number("attention_multiplier", 1.0),
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        residual_scale=reader.number("residual_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
    )
    reader.finish(MIXTURE_HARMLESS)
    return scaled


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    mixture_config(file, config, normalize=True)
    same_width(file, config)
    file.move(
        config,
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    )
    return config


_GRANITE = (
    TINY
    | TINY_MIXTURE
    | {
        "model_type": MODEL_TYPE,
        "num_local_experts": 4,
        "attention_multiplier": 0.1,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
    }
)

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("GraniteMoeForCausalLM",),
    spec=spec,
    tiny=(
        _GRANITE,
        _GRANITE
        | {
            "num_local_experts": 7,
            "num_experts_per_tok": 4,
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    layout=Layout(
        places={
            "block_sparse_moe.router.layer": Place(("mlp.gate",)),
            "block_sparse_moe.input_linear": Place(_GATE_UP, stacked=True),
            "block_sparse_moe.output_linear": Place(_DOWN, stacked=True),
        }
    ),
    gguf=GgufForm(
        "granitemoe",
        _gguf_config,
        interleaved=True,
        names={"ffn_gate_inp": "block_sparse_moe.router.layer"},
    ),
)
