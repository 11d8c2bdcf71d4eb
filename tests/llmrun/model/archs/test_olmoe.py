"""OLMoE: the published config, and what is refused."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.architecture import find
from llmrun.model.parameters import expected
from llmrun.model.spec import MixtureSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 50304,
}
"""allenai/OLMoE-1B-7B-0924"""

SPEC = find("olmoe").spec


def test_published_config() -> None:
    spec = SPEC(PUBLISHED)
    assert spec.mixture == MixtureSpec(64, 8, 1024, normalize=False)
    assert spec.heads == Heads(16, 16, 128)
    shapes = {name: parameter.shape for name, parameter in expected(spec).items()}
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (2048,)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (2048,)
    assert SPEC(PUBLISHED | {"norm_topk_prob": True}).mixture == MixtureSpec(64, 8, 1024, True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"num_shared_experts": 1}, "num_shared_experts"),
        ({"num_experts_per_tok": 65}, "chooses 65 of 64"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        SPEC(PUBLISHED | change)
