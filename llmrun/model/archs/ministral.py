"""Ministral 8B of 2024: Mistral with a window in some layers.

Reference: ``MinistralForCausalLM`` in transformers.
"""

from llmrun.model.architecture import Architecture, Config
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import FULL, SLIDING, read_layer_types, windowed, windows_of

MODEL_TYPE = "ministral"


def spec(config: Config) -> DecoderSpec:
    """Read a Ministral config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    window = reader.optional_integer("sliding_window", 4096)
    result = read_spec(reader, MODEL_TYPE, Defaults(kv_heads=8, positions=131_072))
    types = read_layer_types(reader, [FULL if window is None else SLIDING] * len(result.layers))
    reader.finish(HARMLESS)
    return windowed(result, windows_of(types, window))


_MINISTRAL = TINY | {"model_type": MODEL_TYPE, "sliding_window": 20}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("MinistralForCausalLM",),
    spec=spec,
    tiny=(
        _MINISTRAL
        | {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
        },
        _MINISTRAL | {"head_dim": 16, "tie_word_embeddings": True},
    ),
)
