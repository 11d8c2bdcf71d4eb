"""OLMo 3: the published config of the 7B in both forms, its GGUF form, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads, Rope
from llmrun.model.archs.olmo3 import spec

YARN: dict[str, object] = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
PUBLISHED: dict[str, object] = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": False,
    "vocab_size": 100278,
}


def test_published_config() -> None:
    olmo = spec(PUBLISHED)
    assert olmo.heads == Heads(32, 32, 128)
    assert [layer.window for layer in olmo.layers[:5]] == [4096, 4096, 4096, None, 4096]
    sliding, full = olmo.layers[0].rope, olmo.layers[3].rope
    assert isinstance(sliding, Rope)
    assert isinstance(full, Rope)
    # YaRN slows the slowest pair eight times, in layers that see everything only.
    assert full.inv_freq[-1] == pytest.approx(sliding.inv_freq[-1] / 8)
    assert sliding.inv_freq[1] == pytest.approx(500000 ** (-2 / 128))
    assert (sliding.attention_factor, full.attention_factor) == (1.0, 1.2079441541679836)
    assert (olmo.qk_norm, olmo.norm.before, olmo.norm.after) == ("whole", False, True)


def test_newer_and_shorter_configs_mean_the_same() -> None:
    newer = {k: v for k, v in PUBLISHED.items() if k not in ("rope_scaling", "rope_theta")}
    newer["rope_parameters"] = {
        "full_attention": YARN | {"rope_theta": 500000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
    }
    assert spec(newer) == spec(PUBLISHED)
    defaults = ("layer_types", "rope_theta", "sliding_window")
    assert spec({k: v for k, v in PUBLISHED.items() if k not in defaults}) == spec(PUBLISHED)


@pytest.mark.parametrize("change", [{"clip_qkv": 8.0}, {"layer_types": ["chunked_attention"] * 32}])
def test_other_keys_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=r"clip_qkv|chunked_attention"):
        spec(PUBLISHED | change)


def test_gguf_calls_it_olmo2(gguf_config: Callable[..., Any]) -> None:
    file = {
        "block_count": 32,
        "context_length": 65536,
        "embedding_length": 4096,
        "feed_forward_length": 11008,
        "attention.head_count": 32,
        "attention.head_count_kv": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 4096,
        "attention.sliding_window_pattern": [*[True] * 3, False] * 8,
        "rope.freq_base": 500000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 8192,
        "rope.scaling.yarn_attn_factor": 1.2079441541679836,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }
    tensors = {"token_embd.weight": (100278, 4096), "output.weight": (100278, 4096)}
    config = gguf_config("olmo2", file, tensors)
    assert config["model_type"] == "olmo3"
    assert spec(config) == spec(PUBLISHED)
    del file["attention.sliding_window_pattern"]  # every fourth is what it means then
    assert spec(gguf_config("olmo2", file, tensors)) == spec(PUBLISHED)
