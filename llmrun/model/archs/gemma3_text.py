"""Gemma 3, text models and the text part of the others: a window in five layers of six.

Queries and keys are normed head by head; layers with a window have a rotation of their own.
Reference: ``Gemma3ForCausalLM`` in transformers (Gemma Team 2025).
"""

from collections.abc import Mapping
from dataclasses import replace

from llmrun.kernels.ops import Rope
from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader, positive_integer
from llmrun.model.gemma_family import GGUF_NAMES, PLACES, finish_gguf, read_gemma
from llmrun.model.gguf import GgufFile, common_config, read_windows
from llmrun.model.layout import Layout
from llmrun.model.llama_family import TINY
from llmrun.model.rope import DEFAULT_THETA, read_rope
from llmrun.model.spec import DecoderSpec, LayerSpec, RopeByLength
from llmrun.model.windows import FULL, SLIDING, every_nth_full, read_layer_types

MODEL_TYPE = "gemma3_text"
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
PATTERN = 6

DEFAULTS: Config = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""Sizes that published configs leave out where they are the library's."""


def spec(config: Config) -> DecoderSpec:
    """Read a Gemma 3 text config. ModelFileError names what is not supported."""
    reader = ConfigReader({**DEFAULTS, **config})
    result = read_gemma(reader, MODEL_TYPE, 131_072, GLOBAL_THETA)
    pattern = reader.integer("sliding_window_pattern", PATTERN)
    types = read_layer_types(reader, every_nth_full(len(result.layers), pattern))
    window = reader.optional_integer("sliding_window", 4096)
    cap = reader.optional_number("final_logit_softcapping")
    local = LayerSpec(_local_rope(config, reader, result), window)
    reader.finish(HARMLESS)
    layers = (local if kind == SLIDING else result.layers[0] for kind in types)
    return replace(result, layers=tuple(layers), qk_norm="head", logit_cap=cap)


def _local_rope(config: Config, reader: ConfigReader, spec: DecoderSpec) -> Rope | RopeByLength:
    """The rotation of layers with a window: never that of ``rope_theta`` and ``rope_scaling``."""
    theta = reader.number("rope_local_base_freq", LOCAL_THETA)
    parameters = config.get("rope_parameters")
    own = parameters.get(SLIDING) if isinstance(parameters, Mapping) else None
    section = ConfigReader({"rope_parameters": own})
    return read_rope(section, spec.heads.head_dim, spec.max_positions, theta=theta)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    theta = config.pop("rope_theta", DEFAULT_THETA)
    config["rope_parameters"] = {
        FULL: config.get("rope_parameters", {"rope_type": "default", "rope_theta": theta}),
        SLIDING: {
            "rope_type": "default",
            "rope_theta": file.take("rope.freq_base_swa", LOCAL_THETA),
        },
    }
    file.move(config, {"final_logit_softcapping": "final_logit_softcapping"})
    everywhere = {"layer_types": [FULL] * (positive_integer(config.get("num_hidden_layers")) or 1)}
    config |= everywhere | read_windows(file, config, PATTERN)
    finish_gguf(file, config)
    return config


_TINY = TINY | {
    "model_type": MODEL_TYPE,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "tie_word_embeddings": True,
}
_LOCAL = {"rope_type": "default", "rope_theta": 100.0}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Gemma3ForCausalLM",),
    spec=spec,
    tiny=(
        _TINY
        | {
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 8.0},
                SLIDING: _LOCAL,
            },
        },
        _TINY
        | {
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, FULL],
            "num_key_value_heads": 1,
            "attention_bias": True,
            "final_logit_softcapping": 1.5,
            "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 5_000.0}},
        },
    ),
    layout=Layout(PLACES),
    gguf=GgufForm("gemma3", _gguf_config, names=GGUF_NAMES),
)
