"""ERNIE 4.5, dense: Llama with a free head size and rotary pairs next to each other.

Reference: ``Ernie4_5ForCausalLM`` in transformers.
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.layout import Layout
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec

MODEL_TYPE = "ernie4_5"


def spec(config: Config) -> DecoderSpec:
    """Read an ERNIE 4.5 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    bias = reader.flag("use_bias", False)
    defaults = Defaults(
        kv_heads=2, head_dim=128, positions=131_072, theta=500_000.0, eps=1e-5, tied=True
    )
    result = read_spec(reader, MODEL_TYPE, defaults)
    reader.finish(HARMLESS)
    return replace(result, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    return config | {"use_bias": "blk.0.attn_q.bias" in file.shapes}


_ERNIE = TINY | {"model_type": MODEL_TYPE, "pad_token_id": 0}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Ernie4_5ForCausalLM",),
    spec=spec,
    tiny=(
        _ERNIE | {"head_dim": 32, "tie_word_embeddings": True},
        _ERNIE | {"head_dim": None, "use_bias": True, "num_key_value_heads": 4},
    ),
    layout=Layout(paired=True),
    gguf=GgufForm("ernie4_5", _gguf_config),
)
