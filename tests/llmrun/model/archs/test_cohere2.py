"""Cohere 2: the published config of Command R7B, its GGUF form, and what is refused."""

from collections.abc import Callable
from typing import Any

import gguf
import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads, Rope
from llmrun.model.archs.cohere2 import spec
from llmrun.model.parameters import expected
from llmrun.model.spec import NormSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 5,
    "cache_implementation": "hybrid",
    "eos_token_id": 255001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "pad_token_id": 0,
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0.dev0",
    "use_cache": True,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "vocab_size": 256000,
}


def test_published_config() -> None:
    command = spec(PUBLISHED)
    assert command.heads == Heads(32, 8, 128)
    assert command.norm == NormSpec(1e-5, centered=True)
    assert (command.parallel, command.tied, command.logit_scale) == (True, True, 0.25)
    assert [layer.window for layer in command.layers[:5]] == [4096, 4096, 4096, None, 4096]
    rotated = [layer.rope is not None for layer in command.layers[:5]]
    assert rotated == [True, True, True, False, True]
    assert isinstance(command.layers[0].rope, Rope)
    assert command.layers[0].rope.inv_freq[1] == pytest.approx(50000 ** (-2 / 128))
    assert not any("post_attention" in name for name in expected(command))


def test_newer_configs_mean_the_same() -> None:
    newer = {k: v for k, v in PUBLISHED.items() if k not in ("sliding_window_pattern",)}
    newer["layer_types"] = [*["sliding_attention"] * 3, "full_attention"] * 8
    assert spec(newer) == spec(PUBLISHED)


@pytest.mark.parametrize(
    "change",
    [
        {"use_qk_norm": True},
        {"use_parallel_block": False},
        {"position_embedding_type": "alibi"},
        {"rotary_pct": 0.5},
        {"layer_switch": 2},
        {"num_experts": 8},
    ],
)
def test_other_blocks_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change))):
        spec(PUBLISHED | change)


def test_gguf(gguf_config: Callable[..., Any], named_back: Callable[..., None]) -> None:
    file = {
        "block_count": 32,
        "context_length": 8192,
        "embedding_length": 4096,
        "feed_forward_length": 14336,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.sliding_window": 4096,
        "logit_scale": 0.25,
        "rope.dimension_count": 128,
        "rope.freq_base": 50000.0,
        "rope.scaling.type": "none",
        "vocab_size": 256000,
    }
    config = gguf_config("cohere2", file, {"token_embd.weight": (256000, 4096)})
    assert spec(config) == spec(PUBLISHED)
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    parts += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    named_back(gguf.MODEL_ARCH.COHERE2, [*parts, "input_layernorm"])
