"""Granite with experts: the published config, and what is refused."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.model.architecture import find
from llmrun.model.spec import MixtureSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 4096,
    "model_type": "granitemoe",
    "num_attention_heads": 16,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0.dev0",
    "use_cache": True,
    "vocab_size": 49155,
}
"""ibm-granite/granite-3.0-1b-a400m-instruct"""

SPEC = find("granitemoe").spec


def test_published_config() -> None:
    spec = SPEC(PUBLISHED)
    assert spec.mixture == MixtureSpec(32, 8, 512, normalize=True)
    assert (spec.attention_scale, spec.embedding_scale) == (0.015625, 12.0)
    assert (spec.residual_scale, spec.logit_scale) == (0.22, 1 / 6.0)
    assert spec.tied


def test_multipliers_that_are_not_there_are_one() -> None:
    bare = {key: value for key, value in PUBLISHED.items() if not key.endswith("multiplier")}
    spec = SPEC(bare | {"logits_scaling": 1.0})
    assert (spec.attention_scale, spec.embedding_scale) == (1.0, 1.0)
    assert (spec.residual_scale, spec.logit_scale) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shared_intermediate_size": 512}, "shared_intermediate_size"),
        ({"logits_scaling": 0}, "logits_scaling"),
        ({"attention_multiplier": "auto"}, "attention_multiplier"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        SPEC(PUBLISHED | change)
