"""OLMo 3: OLMo 2 with sliding windows in three of four layers, YaRN in the others only.

Reference: ``Olmo3ForCausalLM`` in transformers (Team OLMo et al. 2025).
"""

from dataclasses import replace
from typing import cast

from llmrun.kernels.ops import Rope
from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.archs.olmo2 import (
    GGUF_NAME,
    POST_NORM_NAMES,
    POST_NORMS,
    is_windowed,
    read_olmo,
)
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.frequencies import base
from llmrun.model.gguf import GgufFile, common_config, read_windows
from llmrun.model.llama_family import TINY, Defaults
from llmrun.model.rope import has_rope_per_layer_type, read_rope
from llmrun.model.spec import DecoderSpec, LayerSpec, RopeByLength
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


def _sliding_rope(reader: ConfigReader, spec: DecoderSpec) -> Rope | RopeByLength:
    head_dim = spec.heads.head_dim
    if has_rope_per_layer_type(reader):
        return read_rope(reader, head_dim, spec.max_positions, theta=THETA, layer_type=SLIDING)
    section = reader.section("rope_parameters")
    theta = reader.number("rope_theta", THETA)
    theta = theta if section is None else section.number("rope_theta", theta)
    return Rope(base(theta, head_dim))


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    config |= read_windows(file, config, pattern=4)
    theta = config.pop("rope_theta", THETA)
    full = config.pop("rope_parameters", {"rope_type": "default", "rope_theta": theta})
    theta = file.take("rope.freq_base_swa", cast("dict[str, object]", full)["rope_theta"])
    sliding = {"rope_type": "default", "rope_theta": theta}
    return config | {"rope_parameters": {FULL: full, SLIDING: sliding}}


_OLMO3 = TINY | {"model_type": MODEL_TYPE, "sliding_window": 20}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Olmo3ForCausalLM",),
    spec=spec,
    tiny=(
        _OLMO3
        | {
            "num_hidden_layers": 4,
            "rope_parameters": {
                FULL: {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "attention_factor": 1.2079441541679836,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 20_000.0},
            },
        },
        _OLMO3
        | {
            "layer_types": [FULL, SLIDING],
            "attention_bias": True,
            "rope_parameters": None,
            "rope_theta": 10_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    layout=POST_NORMS,
    gguf=GgufForm(GGUF_NAME, _gguf_config, names=POST_NORM_NAMES, applies=is_windowed),
)
