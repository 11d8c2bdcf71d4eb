"""Granite 3's published config, and GGUF files of Granite 3 and of dense Granite 4."""

from collections.abc import Callable

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.archs.granite import spec

GRANITE_3_3_2B: dict[str, object] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.49.0",
    "use_cache": True,
    "vocab_size": 49159,
}
GGUF: dict[str, object] = {
    "vocab_size": 49159,
    "context_length": 131072,
    "embedding_length": 2048,
    "block_count": 40,
    "feed_forward_length": 8192,
    "rope.dimension_count": 64,
    "rope.freq_base": 10000000.0,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "attention.layer_norm_rms_epsilon": 1e-05,
    "attention.scale": 0.015625,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "logit_scale": 8.0,
}
TENSORS = {"token_embd.weight": (49159, 2048)}


def test_granite_3_3_2b() -> None:
    granite = spec(GRANITE_3_3_2B)
    assert (granite.heads, granite.tied, granite.qkv_bias) == (Heads(32, 8, 64), True, False)
    assert (granite.attention_scale, granite.embedding_scale) == (1 / 64, 12.0)
    assert (granite.residual_scale, granite.logit_scale) == (0.22, 1 / 8)


@pytest.mark.parametrize("change", [{"mystery": 1}, {"logits_scaling": 0}])
def test_what_it_does_not_know_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change))):
        spec(GRANITE_3_3_2B | change)


def test_gguf(gguf_config: Callable[..., dict[str, object]]) -> None:
    assert spec(gguf_config("granite", GGUF, TENSORS)) == spec(GRANITE_3_3_2B)


def test_gguf_without_an_attention_scale(gguf_config: Callable[..., dict[str, object]]) -> None:
    # What the ggml project's code does then, not the published default of 1.
    stored = {key: value for key, value in GGUF.items() if key != "attention.scale"}
    assert spec(gguf_config("granite", stored, TENSORS)).attention_scale == 1 / 8


def test_gguf_of_dense_granite_4(gguf_config: Callable[..., dict[str, object]]) -> None:
    more = {
        "attention.head_count_kv": [8] * 40,
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_shared_feed_forward_length": 8192,
        "rope.scaling.finetuned": True,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 1,
        "ssm.inner_size": 4096,
        "ssm.state_size": 256,
        "ssm.time_step_rank": 128,
    }
    assert spec(gguf_config("granite", GGUF | more, TENSORS)) == spec(GRANITE_3_3_2B)


@pytest.mark.parametrize(
    "more", [{"rope.scaling.finetuned": False}, {"expert_count": 4}, {"deepstack_mapping": [1]}]
)
def test_gguf_of_other_models_is_refused(
    more: dict[str, object], gguf_config: Callable[..., dict[str, object]]
) -> None:
    with pytest.raises(ModelFileError, match=next(iter(more))):
        gguf_config("granite", GGUF | more, TENSORS)
