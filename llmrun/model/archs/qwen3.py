"""Qwen 3, dense: Llama with RMSNorm on every query and key head and a free head size.

Reference: ``Qwen3ForCausalLM`` in transformers (Yang et al. 2025).
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import read_qwen_windows, windowed

MODEL_TYPE = "qwen3"


def spec(config: Config) -> DecoderSpec:
    """Read a Qwen 3 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", False)
    windows = read_qwen_windows(reader)
    defaults = Defaults(kv_heads=32, head_dim=128, positions=32_768)
    result = windowed(read_spec(reader, MODEL_TYPE, defaults), windows)
    reader.finish(HARMLESS)
    return replace(result, qkv_bias=bias, output_bias=bias, qk_norm="head")


def _gguf_config(file: GgufFile) -> dict[str, object]:
    return common_config(file, MODEL_TYPE)


ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Qwen3ForCausalLM",),
    spec=spec,
    tiny=(
        TINY | {"model_type": MODEL_TYPE, "head_dim": 32, "tie_word_embeddings": True},
        TINY | {"model_type": MODEL_TYPE, "head_dim": 16, "attention_bias": True},
    ),
    gguf=GgufForm("qwen3", _gguf_config),
)
