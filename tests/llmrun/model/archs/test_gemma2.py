"""Gemma 2's published config, and its GGUF files."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.archs.gemma2 import spec

GEMMA_2_2B: dict[str, object] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_2_27B = GEMMA_2_2B | {
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
}


def metadata(config: dict[str, object]) -> dict[str, object]:
    """What the converter of the ggml project writes."""
    return {
        "context_length": 8192,
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-06,
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


def test_gemma_2_2b() -> None:
    gemma = spec(GEMMA_2_2B)
    assert (gemma.heads, gemma.tied, gemma.activation) == (Heads(8, 4, 256), True, "gelu_tanh")
    assert [layer.window for layer in gemma.layers] == [4096, None] * 13
    assert (gemma.attention_cap, gemma.logit_cap) == (50.0, 30.0)
    assert (gemma.attention_scale, gemma.embedding_scale) == (1 / 16, 48.0)
    assert (gemma.norm.offset, gemma.norm.before, gemma.norm.after) == (1.0, True, True)


def test_27b_scales_queries_by_another_number_than_its_head_size() -> None:
    assert spec(GEMMA_2_27B).attention_scale == pytest.approx(1 / 12)


def test_caps_are_there_unless_the_config_says_null() -> None:
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    absent = spec({key: value for key, value in GEMMA_2_2B.items() if key not in keys})
    assert absent == spec(GEMMA_2_2B)
    none = spec(GEMMA_2_2B | dict.fromkeys(keys))
    assert (none.attention_cap, none.logit_cap) == (None, None)


@pytest.mark.parametrize(
    "change", [{"mystery": 1}, {"use_bidirectional_attention": True}, {"hidden_act": "silu"}]
)
def test_what_it_does_not_know_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change))):
        spec(GEMMA_2_2B | change)


@pytest.mark.parametrize("config", [GEMMA_2_2B, GEMMA_2_27B], ids=["2b", "27b"])
def test_gguf(config: dict[str, object], gguf_config: Callable[..., dict[str, object]]) -> None:
    tensors = {"token_embd.weight": (256000, config["hidden_size"])}
    from_file = spec(gguf_config("gemma2", metadata(config), tensors))
    assert from_file.norm.offset == 0.0  # the file's norms have 1 added already
    published = spec(config)
    assert replace(from_file, norm=published.norm) == published
