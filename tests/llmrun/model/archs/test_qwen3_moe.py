"""Qwen 3 with experts: the published configs, which layers have experts, and what is refused."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.architecture import find
from llmrun.model.parameters import expected
from llmrun.model.spec import MixtureSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Qwen/Qwen3-30B-A3B"""

CODER = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
"""What the configs of Qwen3-Coder say besides."""

SPEC = find("qwen3_moe").spec


def test_published_config() -> None:
    spec = SPEC(PUBLISHED)
    assert spec.mixture == MixtureSpec(128, 8, 768, normalize=True)
    assert spec.heads == Heads(32, 4, 128)
    assert spec.qk_norm == "head"
    assert not spec.qkv_bias
    assert all(layer.experts and layer.window is None for layer in spec.layers)
    assert SPEC(PUBLISHED | CODER) == spec


def test_either_name_of_the_number_of_experts() -> None:
    renamed = {key: value for key, value in PUBLISHED.items() if key != "num_experts"}
    assert SPEC(renamed | {"num_local_experts": 128}) == SPEC(PUBLISHED)


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({"mlp_only_layers": [0, 3]}, [1, 2, 4, 5]),
        ({"decoder_sparse_step": 3}, [2, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3, 5]),
    ],
)
def test_some_layers_keep_their_mlp(change: dict[str, object], sparse: list[int]) -> None:
    spec = SPEC(PUBLISHED | {"num_hidden_layers": 6} | change)
    assert [number for number, layer in enumerate(spec.layers) if layer.experts] == sparse
    shapes = {name: parameter.shape for name, parameter in expected(spec).items()}
    for layer in range(6):
        part = "experts.0.up_proj" if layer in sparse else "up_proj"
        width = 768 if layer in sparse else 6144
        assert shapes[f"model.layers.{layer}.mlp.{part}.weight"] == (width, 2048)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        ({"use_qk_norm": False}, "use_qk_norm"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers"),
        ({"use_sliding_window": True, "sliding_window": 512}, "max_window_layers"),
        ({"n_group": 4}, "n_group"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        SPEC(PUBLISHED | change)
