"""GLM 4: the published configs of the 9B and the 32B of 0414, the GGUF form, what is refused."""

from collections.abc import Callable
from typing import Any

import gguf
import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads, Rope
from llmrun.model.archs.glm4 import spec
from llmrun.model.spec import NormSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0.dev0",
    "use_cache": True,
    "vocab_size": 151552,
}


def test_published_config() -> None:
    glm = spec(PUBLISHED)
    assert glm.heads == Heads(32, 2, 128)
    assert isinstance(glm.layers[0].rope, Rope)
    assert len(glm.layers[0].rope.inv_freq) == 32  # 64 of 128 dimensions
    assert glm.norm == NormSpec(1e-5, before=True, after=True)
    assert (glm.qkv_bias, glm.output_bias, glm.mlp_bias) == (True, False, False)


def test_defaults_and_newer_configs_mean_the_same() -> None:
    absent = ("attention_bias", "head_dim", "partial_rotary_factor", "rope_theta")
    absent += ("num_key_value_heads",)
    short = {k: v for k, v in PUBLISHED.items() if k not in absent}
    assert spec(short) == spec(PUBLISHED)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert spec(short | {"rope_parameters": rope}) == spec(PUBLISHED)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ModelFileError, match="use_qk_norm"):
        spec(PUBLISHED | {"use_qk_norm": True})


def test_gguf(gguf_config: Callable[..., Any], named_back: Callable[..., None]) -> None:
    file = {
        "block_count": 40,
        "context_length": 32768,
        "embedding_length": 4096,
        "feed_forward_length": 13696,
        "attention.head_count": 32,
        "attention.head_count_kv": 2,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 64,
        "rope.freq_base": 10000.0,
    }
    tensors = {"token_embd.weight": (151552, 4096), "output.weight": (151552, 4096)}
    biased = tensors | {"blk.0.attn_q.bias": (4096,)}
    assert spec(gguf_config("glm4", file, biased)) == spec(PUBLISHED)
    assert spec(gguf_config("glm4", file, tensors)) == spec(PUBLISHED | {"attention_bias": False})
    whole = spec(gguf_config("glm4", file | {"rope.dimension_count": 128}, tensors))
    assert isinstance(whole.layers[0].rope, Rope)
    assert len(whole.layers[0].rope.inv_freq) == 64
    parts = ["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm"]
    parts += ["post_mlp_layernorm", "self_attn.q_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_up_proj", "mlp.down_proj"]
    named_back(gguf.MODEL_ARCH.GLM4, parts)


def test_gguf_of_a_model_that_sees_is_refused(gguf_config: Callable[..., Any]) -> None:
    with pytest.raises(ModelFileError, match="dimension_sections"):
        gguf_config("glm4", {"rope.dimension_sections": [8, 12, 12, 0]}, {})
