"""OLMo 2: the published config of the 1B, its GGUF form, and what is refused."""

from collections.abc import Callable
from typing import Any

import gguf
import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.archs.olmo2 import spec
from llmrun.model.parameters import expected
from llmrun.model.spec import NormSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0",
    "use_cache": True,
    "vocab_size": 100352,
}


def test_published_config() -> None:
    olmo = spec(PUBLISHED)
    assert olmo.heads == Heads(16, 16, 128)
    assert olmo.norm == NormSpec(1e-6, before=False, after=True)
    assert olmo.qk_norm == "whole"
    assert (olmo.max_positions, olmo.tied, olmo.qkv_bias) == (4096, False, False)
    parameters = expected(olmo)
    assert parameters["model.layers.0.self_attn.k_norm.weight"].shape == (2048,)
    assert not any("input_layernorm" in name for name in parameters)


@pytest.mark.parametrize("change", [{"clip_qkv": 8.0}, {"sliding_window": 4096}])
def test_other_keys_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change))):
        spec(PUBLISHED | change)


def test_gguf(gguf_config: Callable[..., Any], named_back: Callable[..., None]) -> None:
    file = {
        "block_count": 16,
        "context_length": 4096,
        "embedding_length": 2048,
        "feed_forward_length": 8192,
        "attention.head_count": 16,
        "attention.head_count_kv": 16,
        "rope.freq_base": 500000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    tensors = {"token_embd.weight": (100352, 2048), "output.weight": (100352, 2048)}
    assert spec(gguf_config("olmo2", file, tensors)) == spec(PUBLISHED)
    parts = [f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += ["post_attention_layernorm", "post_feedforward_layernorm"]
    named_back(gguf.MODEL_ARCH.OLMO2, parts)
