"""Gemma 3's published text configs, and its GGUF files."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads, Rope
from llmrun.model import frequencies
from llmrun.model.archs.gemma3_text import spec

GEMMA_3_1B: dict[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
WINDOWS = ([512] * 5 + [None]) * 4 + [512] * 2
GLOBAL = Rope(frequencies.base(1_000_000.0, 256))
LOCAL = Rope(frequencies.base(10_000.0, 256))
LINEAR = {"rope_type": "linear", "factor": 8.0}


def metadata(config: dict[str, object]) -> dict[str, object]:
    """What the converter of the ggml project writes."""
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-06,
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base": 1000000.0,
    }


def test_gemma_3_1b() -> None:
    gemma = spec(GEMMA_3_1B)
    assert (gemma.heads, gemma.tied, gemma.qk_norm) == (Heads(4, 1, 256), True, "head")
    assert [layer.window for layer in gemma.layers] == WINDOWS
    assert all(layer.rope == (GLOBAL if layer.window is None else LOCAL) for layer in gemma.layers)
    assert (gemma.attention_scale, gemma.embedding_scale) == (1 / 16, 1152**0.5)
    assert (gemma.attention_cap, gemma.logit_cap) == (None, None)


def test_scaling_is_for_layers_without_a_window_only() -> None:
    old = spec(GEMMA_3_1B | {"rope_scaling": LINEAR})
    assert old.layers[0].rope == LOCAL
    assert old.layers[5].rope == Rope(frequencies.linear(1_000_000.0, 256, 8.0))


def test_both_config_layouts_mean_the_same() -> None:
    old_keys = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
    new = {key: value for key, value in GEMMA_3_1B.items() if key not in old_keys}
    types = ["full_attention" if window is None else "sliding_attention" for window in WINDOWS]
    ropes = {
        "full_attention": LINEAR | {"rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    new |= {"layer_types": types, "rope_parameters": ropes}
    assert spec(new) == spec(GEMMA_3_1B | {"rope_scaling": LINEAR})
    # A section without a base takes that of its own type of layer.
    bare = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}
    assert spec(new | {"rope_parameters": bare}) == spec(new)


@pytest.mark.parametrize(
    "change",
    [
        {"mystery": 1},
        {"use_bidirectional_attention": True},
        {"attn_logit_softcapping": 50.0},
        {"rope_parameters": {"sliding_attention": {"rope_type": "spiral"}}},
    ],
)
def test_what_it_does_not_know_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change)) + "|spiral"):
        spec(GEMMA_3_1B | change)


def test_gguf(gguf_config: Callable[..., dict[str, object]]) -> None:
    tensors = {"token_embd.weight": (262144, 1152)}
    from_file = spec(gguf_config("gemma3", metadata(GEMMA_3_1B), tensors))
    assert from_file.norm.offset == 0.0  # the file's norms have 1 added already
    published = spec(GEMMA_3_1B)
    assert replace(from_file, norm=published.norm) == published


def test_gguf_of_the_27b_model(gguf_config: Callable[..., dict[str, object]]) -> None:
    config = GEMMA_3_1B | {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": LINEAR,
        "sliding_window": 1024,
    }
    stored = metadata(config) | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    from_file = spec(gguf_config("gemma3", stored, {"token_embd.weight": (262144, 5376)}))
    published = spec(config)
    assert replace(from_file, norm=published.norm) == published


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"attention.sliding_window_pattern": 2}, [512, None, 512]),
        ({"attention.sliding_window_pattern": [False, True, True]}, [None, 512, 512]),
        ({"attention.sliding_window": None}, [None] * 3),
    ],
)
def test_gguf_patterns(
    more: dict[str, object],
    windows: list[int | None],
    gguf_config: Callable[..., dict[str, object]],
) -> None:
    stored = metadata(GEMMA_3_1B) | {"block_count": 3, "rope.freq_base_swa": 5000.0} | more
    stored = {key: value for key, value in stored.items() if value is not None}
    layers = spec(gguf_config("gemma3", stored, {"token_embd.weight": (262144, 1152)})).layers
    assert [layer.window for layer in layers] == windows
    local = Rope(frequencies.base(5000.0, 256))
    assert all(layer.rope == (GLOBAL if layer.window is None else local) for layer in layers)
