"""Mistral 7B and its dense relatives: Llama with an optional sliding window in every layer.

Reference: ``MistralForCausalLM`` in transformers (Jiang et al. 2023).
"""

from llmrun.model.architecture import Architecture, Config
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import windowed

MODEL_TYPE = "mistral"


def spec(config: Config) -> DecoderSpec:
    """Read a Mistral config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    window = reader.optional_integer("sliding_window", 4096)
    result = read_spec(reader, MODEL_TYPE, Defaults(kv_heads=8, positions=131_072))
    reader.finish(HARMLESS)
    return windowed(result, [window] * len(result.layers))


ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("MistralForCausalLM",),
    spec=spec,
    tiny=(
        TINY | {"model_type": MODEL_TYPE, "sliding_window": None},
        TINY | {"model_type": MODEL_TYPE, "sliding_window": 20, "head_dim": 32},
    ),
)
