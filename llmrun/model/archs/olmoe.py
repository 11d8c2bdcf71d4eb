"""OLMoE 1B-7B: Llama with RMSNorm over whole queries and keys, and a mixture of experts.

Reference: ``OlmoeForCausalLM`` in transformers (Muennighoff et al. 2024). Clipping of queries, keys
and values (``clip_qkv``) is off in published models and refused.
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
    same_width,
    with_mixture,
)
from llmrun.model.spec import DecoderSpec

MODEL_TYPE = "olmoe"


def spec(config: Config) -> DecoderSpec:
    """Read an OLMoE config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", False)
    dense = read_spec(reader, MODEL_TYPE, Defaults(positions=4096, eps=1e-5))
    normalize = reader.flag("norm_topk_prob", False)
    defaults = MixtureDefaults(64, 8)
    mixture = read_mixture(reader, dense.intermediate, defaults, normalize=normalize)
    reader.finish(MIXTURE_HARMLESS)
    result = with_mixture(dense, mixture)
    return replace(result, qkv_bias=bias, output_bias=bias, qk_norm="whole")


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    mixture_config(file, config, normalize=False)
    same_width(file, config)
    return config | {"norm_topk_prob": False}


_OLMOE = TINY | TINY_MIXTURE | {"model_type": MODEL_TYPE, "num_experts": 6}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("OlmoeForCausalLM",),
    spec=spec,
    tiny=(
        _OLMOE | {"num_key_value_heads": 4, "eos_token_id": 0},
        _OLMOE
        | {
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 0,
        },
    ),
    layout=Layout(places=STACKED),
    gguf=GgufForm("olmoe", _gguf_config),
)
