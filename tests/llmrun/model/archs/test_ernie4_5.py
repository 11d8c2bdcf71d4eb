"""ERNIE 4.5: the published config of the 0.3B, its GGUF form, and what is refused."""

from collections.abc import Callable
from typing import Any

import gguf
import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads, Rope
from llmrun.model.archs.ernie4_5 import spec

PUBLISHED: dict[str, object] = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": False,
    "vocab_size": 103424,
}


def test_published_config() -> None:
    ernie = spec(PUBLISHED)
    assert ernie.heads == Heads(16, 2, 128)
    assert ernie.hidden == 1024  # half of what all heads hold
    assert isinstance(ernie.layers[0].rope, Rope)
    assert ernie.layers[0].rope.inv_freq[1] == pytest.approx(500000 ** (-2 / 128))
    assert (ernie.tied, ernie.qkv_bias, ernie.mlp_bias) == (True, False, False)
    absent = ("head_dim", "rope_theta", "num_key_value_heads", "tie_word_embeddings", "use_bias")
    assert spec({k: v for k, v in PUBLISHED.items() if k not in absent}) == ernie


def test_a_mixture_is_refused() -> None:
    with pytest.raises(ModelFileError, match="moe_num_experts"):
        spec(PUBLISHED | {"moe_num_experts": 64})


def test_gguf(gguf_config: Callable[..., Any], named_back: Callable[..., None]) -> None:
    file = {
        "block_count": 18,
        "context_length": 131072,
        "embedding_length": 1024,
        "feed_forward_length": 3072,
        "attention.head_count": 16,
        "attention.head_count_kv": 2,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
    }
    config = gguf_config("ernie4_5", file, {"token_embd.weight": (103424, 1024)})
    assert spec(config) == spec(PUBLISHED)
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    parts += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    named_back(gguf.MODEL_ARCH.ERNIE4_5, parts)
