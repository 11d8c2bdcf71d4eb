"""Mixtral 8x7B and 8x22B: Mistral with a mixture of experts in place of every MLP.

Reference: ``MixtralForCausalLM`` in transformers (Jiang et al. 2024). The chosen experts'
probabilities are divided by their sum, which is a softmax over the chosen logits.
"""

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.layout import Layout, Place
from llmrun.model.llama_family import TINY, Defaults, read_spec
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
from llmrun.model.windows import windowed

MODEL_TYPE = "mixtral"
_DEFAULTS = Defaults(kv_heads=8, positions=131_072, theta=1_000_000.0, eps=1e-5)


def spec(config: Config) -> DecoderSpec:
    """Read a Mixtral config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    window = reader.optional_integer("sliding_window")
    dense = read_spec(reader, MODEL_TYPE, _DEFAULTS)
    mixture = read_mixture(reader, dense.intermediate, MixtureDefaults(8, 2), normalize=True)
    reader.finish(MIXTURE_HARMLESS)
    return windowed(with_mixture(dense, mixture), [window] * len(dense.layers))


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    mixture_config(file, config, normalize=True)
    same_width(file, config)
    return config


def _has_experts(metadata: Config) -> bool:
    return bool(metadata.get("llama.expert_count"))


_MIXTRAL = TINY | TINY_MIXTURE | {"model_type": MODEL_TYPE, "num_local_experts": 4}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("MixtralForCausalLM",),
    spec=spec,
    tiny=(
        _MIXTRAL,
        _MIXTRAL
        | {
            "head_dim": 24,
            "sliding_window": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ),
    layout=Layout(
        places={
            "block_sparse_moe.gate": Place(("mlp.gate",)),
            "block_sparse_moe.experts.*.w1": Place(("mlp.experts.*.gate_proj",)),
            "block_sparse_moe.experts.*.w2": Place(("mlp.experts.*.down_proj",)),
            "block_sparse_moe.experts.*.w3": Place(("mlp.experts.*.up_proj",)),
            **STACKED,
        }
    ),
    gguf=GgufForm(
        "llama",
        _gguf_config,
        interleaved=True,
        names={"ffn_gate_inp": "block_sparse_moe.gate"},
        applies=_has_experts,
    ),
)
