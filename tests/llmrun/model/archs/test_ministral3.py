"""Ministral 3: its text config as published, what queries far behind cost, and its GGUF files."""

from collections.abc import Callable

import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads, Rope
from llmrun.model import frequencies
from llmrun.model.archs.ministral3 import ROPE, spec

YARN: dict[str, object] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
MINISTRAL_3_3B: dict[str, object] = {
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 262144,
    "model_type": "ministral3",
    "num_attention_heads": 32,
    "num_hidden_layers": 26,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": YARN,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 131072,
}
GGUF: dict[str, object] = {
    "vocab_size": 131072,
    "context_length": 262144,
    "embedding_length": 3072,
    "block_count": 26,
    "feed_forward_length": 9216,
    "rope.dimension_count": 128,
    "rope.freq_base": 1000000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 16384,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 1.0,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "attention.key_length": 128,
    "attention.value_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-05,
    "attention.temperature_scale": 0.1,
}
TENSORS = {"token_embd.weight": (131072, 3072)}


def test_ministral_3_3b() -> None:
    ministral = spec(MINISTRAL_3_3B)
    assert (ministral.heads, ministral.tied) == (Heads(32, 8, 128), True)
    yarn = frequencies.yarn(1e6, 128, 16.0, 16384, 32.0, 1.0, True)
    # mscale and mscale_all_dim are the same, so cosine and sine are not stretched.
    assert ministral.layers[0].rope == Rope(yarn, 1.0)
    assert {layer.window for layer in ministral.layers} == {None}


def test_the_context_ends_where_queries_begin_to_be_scaled() -> None:
    end = spec(MINISTRAL_3_3B).max_positions
    scales = get_llama_4_attn_scale(torch.tensor([[0, end - 1, end]]), 0.1, 16384).flatten()
    assert scales[:2].tolist() == [1.0, 1.0]
    assert scales[2] > 1.0
    unscaled = spec(MINISTRAL_3_3B | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}})
    assert unscaled.max_positions == 262144


def test_without_rope_parameters_the_library_s_count() -> None:
    assert spec(MINISTRAL_3_3B | {"rope_parameters": None}) == spec(MINISTRAL_3_3B)
    assert spec(MINISTRAL_3_3B | {"rope_parameters": ROPE}) == spec(MINISTRAL_3_3B)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mystery": 1}, "mystery"),
        ({"rope_parameters": YARN | {"mystery": 1}}, "mystery"),
        ({"rope_parameters": YARN | {"llama_4_scaling_beta": -1}}, "llama_4_scaling_beta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
    ],
)
def test_what_it_does_not_know_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        spec(MINISTRAL_3_3B | change)


def test_gguf(gguf_config: Callable[..., dict[str, object]]) -> None:
    assert spec(gguf_config("mistral3", GGUF, TENSORS)) == spec(MINISTRAL_3_3B)


def test_gguf_of_mistral_small(gguf_config: Callable[..., dict[str, object]]) -> None:
    extras = ("rope.scaling", "attention.temperature")
    plain = {key: value for key, value in GGUF.items() if not key.startswith(extras)}
    small = spec(gguf_config("mistral3", plain, TENSORS))
    assert small.layers[0].rope == Rope(frequencies.base(1e6, 128))
    assert small.max_positions == 262144
