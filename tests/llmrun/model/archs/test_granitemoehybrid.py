"""Published configs of Granite 4: the dense models, and the hybrid ones that are refused."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.archs.granitemoehybrid import spec

GRANITE_4_MICRO: dict[str, object] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.015625,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 8192,
    "layer_types": ["attention"] * 40,
    "logits_scaling": 10,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 80,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 40,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 0,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 100352,
}


def test_granite_4_micro() -> None:
    granite = spec(GRANITE_4_MICRO)
    assert (granite.heads, granite.intermediate, granite.tied) == (Heads(40, 8, 64), 8192, True)
    assert (granite.attention_scale, granite.embedding_scale) == (1 / 64, 12.0)
    assert (granite.residual_scale, granite.logit_scale) == (0.22, 1 / 10)
    assert None not in {layer.rope for layer in granite.layers}


def test_the_shared_width_counts() -> None:
    assert spec(GRANITE_4_MICRO | {"shared_intermediate_size": 4096}).intermediate == 4096


@pytest.mark.parametrize("kind", [None, "nope"])
def test_without_rope_there_are_no_positions(kind: str | None) -> None:
    layers = spec(GRANITE_4_MICRO | {"position_embedding_type": kind}).layers
    assert {layer.rope for layer in layers} == {None}


def test_newer_names_of_the_layers_mean_the_same() -> None:
    newer = GRANITE_4_MICRO | {"layer_types": ["full_attention"] * 40}
    assert spec(newer) == spec(GRANITE_4_MICRO)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mystery": 1}, "mystery"),
        ({"layer_types": ["mamba"] * 5 + ["attention"] * 35}, "'mamba'"),
        ({"layer_types": None}, "'linear_attention'"),
        ({"layer_types": ["attention"] * 39}, "39 layer_types for 40"),
        ({"num_local_experts": 64}, "64 experts"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type"),
        ({"normalization_function": "layernorm"}, "normalization_function"),
    ],
)
def test_other_granites_are_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        spec(GRANITE_4_MICRO | change)
