"""EXAONE 4: the published configs of the 32B and the 1.2B, the GGUF form, what is refused."""

from collections.abc import Callable
from typing import Any

import gguf
import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads, Rope
from llmrun.model import frequencies
from llmrun.model.archs.exaone4 import spec
from llmrun.model.spec import NormSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["Exaone4ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 361,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 27392,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "vocab_size": 102400,
}
SMALL = PUBLISHED | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "layer_types": ["full_attention"] * 30,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "tie_word_embeddings": True,
}


def test_published_config_with_windows() -> None:
    exaone = spec(PUBLISHED)
    assert exaone.heads == Heads(40, 8, 128)
    assert exaone.norm == NormSpec(1e-5, before=False, after=True)
    assert exaone.qk_norm == "head"
    assert [layer.window for layer in exaone.layers[:5]] == [4096, 4096, 4096, None, 4096]
    rotated = [layer.rope is not None for layer in exaone.layers[:5]]
    assert rotated == [True, True, True, False, True]
    assert isinstance(exaone.layers[0].rope, Rope)
    slowest = 1000000 ** (-126 / 128)
    assert exaone.layers[0].rope.inv_freq[-1] == pytest.approx(slowest / 16)


def test_published_config_without_windows() -> None:
    exaone = spec(SMALL)
    assert {layer.window for layer in exaone.layers} == {None}
    assert all(layer.rope is not None for layer in exaone.layers)
    as_saved = SMALL | {"sliding_window_pattern": 0}
    assert spec(as_saved) == exaone


@pytest.mark.parametrize("pattern", ["LLLG", 4])
def test_patterns_in_place_of_types(pattern: object) -> None:
    older = {k: v for k, v in PUBLISHED.items() if k != "layer_types"}
    assert spec(older | {"sliding_window_pattern": pattern}) == spec(PUBLISHED)


def test_letters_leave_the_last_layer_full() -> None:
    older = {k: v for k, v in PUBLISHED.items() if k != "layer_types"}
    exaone = spec(older | {"sliding_window_pattern": "LLG", "num_hidden_layers": 5})
    assert [layer.window for layer in exaone.layers] == [4096, 4096, None, 4096, None]


@pytest.mark.parametrize(
    "change", [{"sliding_window_pattern": "LLX"}, {"num_nextn_predict_layers": 1}]
)
def test_other_values_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change))):
        spec(PUBLISHED | change)


FILE = {
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.head_count_kv": 8,
    "rope.freq_base": 1000000.0,
    "vocab_size": 102400,
}


def _factors(head_dim: int) -> list[float]:
    base = frequencies.base(1000000.0, head_dim)
    scaled = frequencies.llama3(1000000.0, head_dim, 16.0, 1.0, 4.0, 8192)
    return [b / s for b, s in zip(base, scaled, strict=True)]


def test_gguf(gguf_config: Callable[..., Any], named_back: Callable[..., None]) -> None:
    large = FILE | {
        "block_count": 64,
        "context_length": 131072,
        "embedding_length": 5120,
        "feed_forward_length": 27392,
        "attention.head_count": 40,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.sliding_window": 4096,
        "attention.sliding_window_pattern": [*[True] * 3, False] * 16,
    }
    tensors = {"token_embd.weight": (102400, 5120), "output.weight": (102400, 5120)}
    tensors |= {"rope_freqs.weight": _factors(128)}
    assert spec(gguf_config("exaone4", large, tensors)) == spec(PUBLISHED)
    parts = [f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += ["post_attention_layernorm", "post_feedforward_layernorm", "mlp.gate_proj"]
    named_back(gguf.MODEL_ARCH.EXAONE4, parts)


def test_gguf_without_windows(gguf_config: Callable[..., Any]) -> None:
    small = FILE | {
        "block_count": 30,
        "context_length": 65536,
        "embedding_length": 2048,
        "feed_forward_length": 4096,
        "attention.head_count": 32,
        "attention.key_length": 64,
        "attention.value_length": 64,
    }
    tensors = {"token_embd.weight": (102400, 2048), "rope_freqs.weight": _factors(64)}
    assert spec(gguf_config("exaone4", small, tensors)) == spec(SMALL)
