"""Gemma 2: norms around attention and MLP, capped scores and logits, a window in every other layer.

Reference: ``Gemma2ForCausalLM`` in transformers (Gemma Team 2024).
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config, GgufForm
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gemma_family import GGUF_NAMES, PLACES, finish_gguf, read_gemma
from llmrun.model.gguf import GgufFile, common_config
from llmrun.model.layout import Layout
from llmrun.model.llama_family import TINY
from llmrun.model.rope import DEFAULT_THETA
from llmrun.model.spec import DecoderSpec
from llmrun.model.windows import every_nth_full, read_layer_types, windowed, windows_of

MODEL_TYPE = "gemma2"
ATTENTION_CAP, LOGIT_CAP = 50.0, 30.0


def spec(config: Config) -> DecoderSpec:
    """Read a Gemma 2 config. ModelFileError names what is not supported."""
    reader = ConfigReader(
        {"attn_logit_softcapping": ATTENTION_CAP, "final_logit_softcapping": LOGIT_CAP}
        | dict(config)
    )
    result = read_gemma(reader, MODEL_TYPE, 8192, DEFAULT_THETA)
    types = read_layer_types(reader, every_nth_full(len(result.layers), 2))
    windows = windows_of(types, reader.optional_integer("sliding_window", 4096))
    attention_cap = reader.optional_number("attn_logit_softcapping")
    logit_cap = reader.optional_number("final_logit_softcapping")
    reader.finish(HARMLESS)
    return replace(windowed(result, windows), attention_cap=attention_cap, logit_cap=logit_cap)


def _gguf_config(file: GgufFile) -> dict[str, object]:
    config = common_config(file, MODEL_TYPE)
    file.move(
        config,
        {
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    )
    finish_gguf(file, config)
    return config


_GEMMA = TINY | {
    "model_type": MODEL_TYPE,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "attn_logit_softcapping": 0.7,
    "final_logit_softcapping": 1.5,
    "tie_word_embeddings": True,
}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Gemma2ForCausalLM",),
    spec=spec,
    tiny=(
        _GEMMA,
        _GEMMA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
    ),
    layout=Layout(PLACES),
    gguf=GgufForm("gemma2", _gguf_config, names=GGUF_NAMES),
)
