"""Granite 3 with experts (1B-A400M, 3B-A800M): Llama with constant multipliers and a mixture.

Reference: ``GraniteMoeForCausalLM`` in transformers. The router takes a softmax over the chosen
logits, which is the softmax over all divided by the sum of the chosen.
"""

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.granite_family import MULTIPLIER_KEYS, SCALED, read_granite
from llmrun.model.layout import Layout, Place
from llmrun.model.llama_family import TINY
from llmrun.model.mixture import (
    MIXTURE_HARMLESS,
    STACKED,
    TINY_MIXTURE,
    MixtureDefaults,
    mixture_config,
    read_mixture,
    same_width,
    with_mixture,
)
from llmrun.model.spec import DecoderSpec

MODEL_TYPE = "granitemoe"

_GATE_UP = Place(("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"), stacked=True)
_DOWN = Place(("mlp.experts.*.down_proj",), stacked=True)


def spec(config: Config) -> DecoderSpec:
    """Read a Granite MoE config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    dense = read_granite(reader, MODEL_TYPE)
    mixture = read_mixture(reader, dense.intermediate, MixtureDefaults(8, 2), normalize=True)
    reader.finish(MIXTURE_HARMLESS)
    return with_mixture(dense, mixture)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    mixture_config(file, config, normalize=True)
    same_width(file, config)
    file.expect("rope.scaling.finetuned", True)  # False would mean: no rotation at all
    file.move(config, MULTIPLIER_KEYS)
    return config


_GRANITE = TINY | TINY_MIXTURE | SCALED | {"model_type": MODEL_TYPE, "num_local_experts": 4}

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
            "block_sparse_moe.input_linear": _GATE_UP,
            "block_sparse_moe.output_linear": _DOWN,
            # As transformers 5 holds them in memory.
            "block_sparse_moe.router": Place(("mlp.gate",)),
            "block_sparse_moe.experts.gate_up_proj": STACKED["mlp.experts.gate_up_proj"],
            "block_sparse_moe.experts.down_proj": STACKED["mlp.experts.down_proj"],
        }
    ),
    gguf=GgufForm(
        "granitemoe",
        _gguf_config,
        interleaved=True,
        names={"ffn_gate_inp": "block_sparse_moe.router.layer"},
    ),
)
