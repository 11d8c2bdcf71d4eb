"""SmolLM3's published config, and its GGUF files."""

from collections.abc import Callable

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.archs.smollm3 import spec

SMOLLM3_3B: dict[str, object] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128012,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 128256,
}


def test_smollm3_3b() -> None:
    smol = spec(SMOLLM3_3B)
    assert (smol.heads, smol.tied, smol.max_positions) == (Heads(16, 4, 128), True, 65536)
    assert [layer.rope is None for layer in smol.layers] == [False, False, False, True] * 9
    assert {layer.window for layer in smol.layers} == {None}
    derived = {k: v for k, v in SMOLLM3_3B.items() if k not in ("no_rope_layers", "layer_types")}
    assert spec(derived) == smol


def test_windows_only_where_they_are_used() -> None:
    windowed = SMOLLM3_3B | {"use_sliding_window": True, "sliding_window": 4096}
    assert {layer.window for layer in spec(windowed).layers} == {None}
    layers = spec(windowed | {"layer_types": None}).layers
    assert [layer.window for layer in layers] == [None, None, None, 4096] * 9
    unused = spec(SMOLLM3_3B | {"sliding_window": 4096, "layer_types": ["sliding_attention"] * 36})
    assert {layer.window for layer in unused.layers} == {None}


@pytest.mark.parametrize(
    "change",
    [
        {"mystery": 1},
        {"no_rope_layers": [1, 0]},
        {"no_rope_layers": [[1]] * 36},
        {"layer_types": ["mamba"] * 36},
    ],
)
def test_what_it_does_not_know_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change)) + "|mamba"):
        spec(SMOLLM3_3B | change)


def test_gguf(gguf_config: Callable[..., dict[str, object]]) -> None:
    metadata = {
        "vocab_size": 128256,
        "context_length": 65536,
        "embedding_length": 2048,
        "block_count": 36,
        "feed_forward_length": 11008,
        "rope.dimension_count": 128,
        "rope.freq_base": 5000000.0,
        "attention.head_count": 16,
        "attention.head_count_kv": 4,
        "attention.layer_norm_rms_epsilon": 1e-06,
    }
    tensors = {"token_embd.weight": (128256, 2048)}
    assert spec(gguf_config("smollm3", metadata, tensors)) == spec(SMOLLM3_3B)
