"""OLMo 3: OLMo 2 with sliding windows in three of four layers, YaRN in the others only.

Reference: ``Olmo3ForCausalLM`` in transformers (Team OLMo et al. 2025).
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.archs.olmo2 import (
    GGUF_NAME,
    POST_NORM_NAMES,
    POST_NORMS,
    is_windowed,
    read_olmo,
)
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config, read_windows
from llmrun.model.llama_family import TINY, Defaults
from llmrun.model.rope import has_rope_per_layer_type, read_rope
from llmrun.model.spec import DecoderSpec, LayerSpec
from llmrun.model.windows import FULL, SLIDING, every_nth_full, read_layer_types, windows_of

MODEL_TYPE = "olmo3"
THETA = 500_000.0


def spec(config: Config) -> DecoderSpec:
    """Read an OLMo 3 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    result = read_olmo(reader, MODEL_TYPE, Defaults(eps=1e-5, theta=THETA, layer_type=FULL))
    types = read_layer_types(reader, every_nth_full(len(result.layers), 4))
    windows = windows_of(types, reader.optional_integer("sliding_window", 4096))
    ropes = {FULL: result.layers[0].rope, SLIDING: _sliding_rope(reader, result)}
    layers = (LayerSpec(ropes[t], w) for t, w in zip(types, windows, strict=True))
    reader.finish(HARMLESS)
    return replace(result, layers=tuple(layers))
