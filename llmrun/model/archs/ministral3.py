"""Ministral 3: Mistral with YaRN, and queries scaled by their distance beyond the first context.

Reference: ``Ministral3ForCausalLM`` in transformers. Queries at positions from
``original_max_position_embeddings`` on are multiplied by ``1 + beta * log(1 + floor(position /
original))``. No op does that, so the context ends there: up to it the factor is 1.
"""

from collections.abc import Mapping
from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.rope import DEFAULT_THETA
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import windowed

MODEL_TYPE = "ministral3"

ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What the library takes for a config without ``rope_parameters``."""

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


def spec(config: Config) -> DecoderSpec:
    """Read a Ministral 3 config. ModelFileError names what is not supported."""
    rope, end = config.get("rope_parameters"), None
    if rope is None:
        rope = ROPE
    if isinstance(rope, Mapping):
        queries = ConfigReader(rope, "rope_parameters.")
        end = queries.integer(_ORIGINAL) if queries.optional_number(_BETA) else None
        # The library repeats the context in here, too, and reads it nowhere.
        rope = {k: v for k, v in rope.items() if k not in (_BETA, "max_position_embeddings")}
    reader = ConfigReader({**config, "rope_parameters": rope})
    window = reader.optional_integer("sliding_window")
    defaults = Defaults(kv_heads=8, head_dim=128, positions=262_144, eps=1e-5)
    result = read_spec(reader, MODEL_TYPE, defaults)
    reader.finish(HARMLESS)
    positions = result.max_positions
    result = replace(result, max_positions=positions if end is None else min(end, positions))
    return windowed(result, [window] * len(result.layers))


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    theta = config.pop("rope_theta", DEFAULT_THETA)
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": theta})
    assert isinstance(rope, dict)
    all_dims = file.take("rope.scaling.yarn_log_multiplier")
    if all_dims:
        rope |= {"mscale": 1.0, "mscale_all_dim": all_dims}
    file.move(rope, {"attention.temperature_scale": _BETA})
    file.expect("expert_count", 0)
    file.expect("expert_used_count", 0)
    return config | {"rope_parameters": rope}


_YARN = ROPE | {"rope_theta": 10_000.0, "factor": 4.0, _ORIGINAL: 320, "beta_fast": 8.0}
_MINISTRAL = TINY | {"model_type": MODEL_TYPE, "max_position_embeddings": 1280}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Ministral3ForCausalLM",),
    spec=spec,
    tiny=(
        _MINISTRAL | {"head_dim": 32, "rope_parameters": _YARN},
        _MINISTRAL
        | {
            "head_dim": 16,
            "sliding_window": 20,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN | {_ORIGINAL: 32, _BETA: 0.0, "mscale_all_dim": 0.5},
        },
    ),
    gguf=GgufForm("mistral3", _gguf_config, interleaved=True),
)
