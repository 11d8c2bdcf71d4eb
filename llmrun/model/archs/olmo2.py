"""OLMo 2: norms behind attention and MLP instead of before, and on whole rows of queries and keys.

Reference: ``Olmo2ForCausalLM`` in transformers (OLMo et al. 2024).
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.layout import Layout, Place
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec

MODEL_TYPE = "olmo2"
GGUF_NAME = "olmo2"

POST_NORMS = Layout(
    {
        "post_attention_layernorm": Place(("post_self_attn_layernorm",)),
        "post_feedforward_layernorm": Place(("post_mlp_layernorm",)),
    }
)
POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def spec(config: Config) -> DecoderSpec:
    """Read an OLMo 2 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    result = read_olmo(reader, MODEL_TYPE, Defaults(eps=1e-5))
    reader.finish(HARMLESS)
    return result


def read_olmo(reader: ConfigReader, architecture: str, defaults: Defaults) -> DecoderSpec:
    """Read what OLMo 2 and 3 share."""
    bias = reader.flag("attention_bias", False)
    result = read_spec(reader, architecture, defaults)
    norm = replace(result.norm, before=False, after=True)
    return replace(result, norm=norm, qk_norm="whole", qkv_bias=bias, output_bias=bias)


def is_windowed(metadata: Config) -> bool:
    """Whether a GGUF file of this name has sliding windows, which makes it one of OLMo 3."""
    return bool(metadata.get(f"{GGUF_NAME}.attention.sliding_window"))


def _gguf_config(file: GgufFile) -> dict[str, object]:
    file.expect("attention.sliding_window", 0)
    return common_config(file, MODEL_TYPE)


_OLMO2 = TINY | {"model_type": MODEL_TYPE}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Olmo2ForCausalLM",),
    spec=spec,
    tiny=(
        _OLMO2,
        _OLMO2 | {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
    ),
    layout=POST_NORMS,
    gguf=GgufForm(
        GGUF_NAME, _gguf_config, names=POST_NORM_NAMES, applies=lambda m: not is_windowed(m)
    ),
)
