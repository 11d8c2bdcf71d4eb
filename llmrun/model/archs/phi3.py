"""Phi 3, 3.5, 4 and 4 mini, dense: Llama with fused projections, a window and LongRoPE.

Reference: ``Phi3ForCausalLM`` in transformers (Abdin et al. 2024). A sequence longer than
``original_max_position_embeddings`` is rotated by the long factors, all of it.
"""

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile, common_config, read_windows
from llmrun.model.layout import Layout, Place
from llmrun.model.llama_family import TINY, Defaults, read_spec
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import windowed

MODEL_TYPE = "phi3"

TRAINED = {"original_max_position_embeddings": 4096}
"""The default of a key that counts more than the one of the same name in ``rope_parameters``."""

WINDOW_OF_4K = 2047
"""The window of the models with a context of 4096; their first GGUF files lack the key."""

FUSED_QKV = Place(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
FUSED_MLP = Place(("mlp.gate_proj", "mlp.up_proj"))


def spec(config: Config) -> DecoderSpec:
    """Read a Phi 3 config. ModelFileError names what is not supported."""
    reader = ConfigReader(TRAINED | dict(config))
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.pinned(key, False)
    reader.pinned("full_attn_mod", 1)
    reader.pinned("interpolate_factor", 1)
    window = reader.optional_integer("sliding_window")
    result = read_spec(reader, MODEL_TYPE, Defaults(positions=4096, partial=1.0, eps=1e-5))
    reader.finish(HARMLESS)
    return windowed(result, [window] * len(result.layers))


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE) | read_windows(file, {})
    file.move(config, {"rope.scaling.original_context_length": "original_max_position_embeddings"})
    if "phi3.attention.sliding_window" not in file.metadata and file.take("context_length") == 4096:
        config["sliding_window"] = WINDOW_OF_4K
    return config


_PHI3 = TINY | {"model_type": MODEL_TYPE, "pad_token_id": 0}
_LONGROPE: dict[str, object] = {"rope_type": "longrope", "rope_theta": 10_000.0}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Phi3ForCausalLM",),
    spec=spec,
    tiny=(
        _PHI3 | {"sliding_window": 20, "num_key_value_heads": 4},
        _PHI3
        | {
            "original_max_position_embeddings": 32,
            "rope_parameters": _LONGROPE
            | {
                "short_factor": [1.0 + i / 10 for i in range(8)],
                "long_factor": [1.0 + 3 * i for i in range(8)],
            },
        },
        _PHI3
        | {
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "rope_parameters": _LONGROPE
            | {
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 6,
                "long_factor": [1.0 + 2 * i for i in range(6)],
            },
        },
    ),
    layout=Layout({"self_attn.qkv_proj": FUSED_QKV, "mlp.gate_up_proj": FUSED_MLP}),
    gguf=GgufForm(
        "phi3",
        _gguf_config,
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
)
