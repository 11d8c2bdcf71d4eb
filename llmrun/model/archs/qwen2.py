"""Qwen 2 and 2.5: Llama with biases on query, key and value.

Reference: ``Qwen2ForCausalLM`` in transformers (Yang et al. 2024). The sliding window its configs
mention is used from layer ``max_window_layers`` on, and only with ``use_sliding_window``.
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import read_qwen_windows, windowed

MODEL_TYPE = "qwen2"


def spec(config: Config) -> DecoderSpec:
    """Read a Qwen 2 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    reader.pinned("use_mrope", False)
    windows = read_qwen_windows(reader)
    result = read_spec(reader, MODEL_TYPE, Defaults(kv_heads=32, positions=32_768))
    reader.finish(HARMLESS)
    return windowed(replace(result, qkv_bias=True), windows)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    return common_config(file, MODEL_TYPE)


ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Qwen2ForCausalLM",),
    spec=spec,
    tiny=(
        TINY | {"model_type": MODEL_TYPE, "tie_word_embeddings": True},
        TINY
        | {
            "model_type": MODEL_TYPE,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    gguf=GgufForm("qwen2", _gguf_config),
)
