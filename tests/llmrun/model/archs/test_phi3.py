"""Phi 3 configs as published (factors of LongRoPE shortened to easy numbers)."""

from collections.abc import Callable
from typing import Any

import gguf
import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.archs.phi3 import spec
from llmrun.model.spec import RopeByLength

MINI_4K: dict[str, object] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 32064,
}
SHORT = [1.0 + i / 64 for i in range(48)]
LONG = [1.0 + i for i in range(48)]
MINI_128K = MINI_4K | {
    "max_position_embeddings": 131072,
    "sliding_window": 262144,
    "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG},
}
PHI_4_MINI = MINI_128K | {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
ATTENTION_FACTOR = 1.1902380714238083
"""sqrt(1 + ln(131072 / 4096) / ln(4096)), as the files of the 128k models have it."""


def test_mini_4k() -> None:
    phi = spec(MINI_4K)
    assert phi.heads == Heads(32, 32, 96)
    assert phi.rope_limits == ()
    assert [layer.window for layer in phi.layers] == [2047] * 32
    assert (phi.norm.eps, phi.max_positions, phi.tied) == (1e-5, 4096, False)


@pytest.mark.parametrize(
    ("config", "heads"), [(MINI_128K, Heads(32, 32, 96)), (PHI_4_MINI, Heads(24, 8, 128))]
)
def test_r089_r090_short_and_long_factors(config: dict[str, object], heads: Heads) -> None:
    phi = spec(config)
    rope = phi.layers[0].rope
    assert isinstance(rope, RopeByLength)
    assert phi.heads == heads
    assert rope.limits == (4096,)
    short, long = rope.ropes
    assert len(short.inv_freq) == 48  # 96 of 128 dimensions in Phi 4 mini
    assert short.inv_freq[0] == long.inv_freq[0] == 1.0
    assert short.inv_freq[32] / long.inv_freq[32] == pytest.approx(LONG[32] / SHORT[32], rel=1e-6)
    factors = [r.attention_factor for r in rope.ropes]
    assert factors == pytest.approx([ATTENTION_FACTOR] * 2)
    # 4096 tokens are a short sequence, one more makes it a long one.
    assert (phi.rope_stage(8), phi.rope_stage(4096), phi.rope_stage(4097)) == (0, 0, 1)


def test_the_trained_length_beside_the_section_counts_more() -> None:
    section = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    inner = MINI_128K | {"rope_scaling": section | {"original_max_position_embeddings": 8192}}
    assert spec(inner).rope_limits == (4096,)
    del inner["original_max_position_embeddings"]  # 4096 is its default
    assert spec(inner).rope_limits == (4096,)


def test_newer_configs_mean_the_same() -> None:
    newer = {k: v for k, v in PHI_4_MINI.items() if not k.startswith(("rope_", "partial"))}
    newer["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096,
        "short_factor": SHORT,
        "long_factor": LONG,
    }
    assert spec(newer) == spec(PHI_4_MINI)


@pytest.mark.parametrize(
    "change", [{"lm_head_bias": True}, {"full_attn_mod": 2}, {"blocksparse_num_local_blocks": 16}]
)
def test_other_keys_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change))):
        spec(PHI_4_MINI | change)


FILE = {
    "context_length": 131072,
    "rope.scaling.original_context_length": 4096,
    "embedding_length": 3072,
    "feed_forward_length": 8192,
    "block_count": 32,
    "attention.head_count": 24,
    "attention.head_count_kv": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 96,
    "rope.freq_base": 10000.0,
    "attention.sliding_window": 262144,
    "rope.scaling.attn_factor": ATTENTION_FACTOR,
}
FACTORS = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}


def test_gguf_of_phi_4_mini(gguf_config: Callable[..., Any]) -> None:
    config = gguf_config("phi3", FILE, {"token_embd.weight": (200064, 3072)} | FACTORS)
    assert spec(config) == spec(PHI_4_MINI)


def test_gguf_of_mini_4k(gguf_config: Callable[..., Any]) -> None:
    file = FILE | {"context_length": 4096, "attention.head_count": 32}
    file |= {"attention.head_count_kv": 32, "attention.sliding_window": 2047}
    del file["rope.scaling.attn_factor"]
    tensors = {"token_embd.weight": (32064, 3072), "output.weight": (32064, 3072)}
    assert spec(gguf_config("phi3", file, tensors)) == spec(MINI_4K)
    del file["attention.sliding_window"]  # the first files
    assert spec(gguf_config("phi3", file, tensors)) == spec(MINI_4K)
    wide = gguf_config("phi3", file | {"attention.sliding_window": 0}, tensors)
    assert {layer.window for layer in spec(wide).layers} == {None}  # Phi 4


def test_gguf_with_one_list_of_factors_is_refused(gguf_config: Callable[..., Any]) -> None:
    one = {"token_embd.weight": (200064, 3072), "rope_factors_long.weight": LONG}
    with pytest.raises(ModelFileError, match="rope_factors_short"):
        gguf_config("phi3", FILE, one)


def test_gguf_names(named_back: Callable[..., None]) -> None:
    parts = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    parts += ["input_layernorm", "post_attention_layernorm"]
    named_back(gguf.MODEL_ARCH.PHI3, parts)
