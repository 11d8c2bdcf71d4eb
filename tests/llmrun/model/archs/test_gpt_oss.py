"""gpt-oss: the published config, its rotation, its layouts, and what is refused."""

import pytest
import torch
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import Heads, Rope
from llmrun.model.architecture import find
from llmrun.model.binding import Binding, bind_huggingface
from llmrun.model.parameters import expected
from llmrun.model.spec import MixtureSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
"""openai/gpt-oss-20b"""

ARCH = find("gpt_oss")


def test_published_config() -> None:
    spec = ARCH.spec(PUBLISHED)
    assert spec.mixture == MixtureSpec(32, 4, 2880, normalize=True, router_bias=True, bias=True)
    assert spec.heads == Heads(64, 8, 64)
    assert spec.activation == "swiglu_clamped"
    assert spec.sinks
    assert spec.qkv_bias
    assert spec.output_bias
    assert [layer.window for layer in spec.layers] == [128, None] * 12


def test_rotation_is_not_truncated_and_the_default() -> None:
    spec = ARCH.spec(PUBLISHED)
    theirs = GptOssConfig(rope_theta=150_000)
    inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    ours = spec.layers[0].rope
    assert isinstance(ours, Rope)
    torch.testing.assert_close(torch.tensor(ours.inv_freq), inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)
    bare = {key: value for key, value in PUBLISHED.items() if key != "rope_scaling"}
    assert ARCH.spec(bare) == spec
    without_types = {key: value for key, value in bare.items() if key != "layer_types"}
    assert ARCH.spec(without_types) == spec


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"swiglu_limit": 10.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"experts_per_token": 8}, "experts_per_token"),
        ({"layer_types": ["chunked_attention"] * 24}, "chunked_attention"),
        ({"some_bias": True}, "some_bias"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        ARCH.spec(PUBLISHED | change)


def bound(experts: dict[str, tuple[int, ...]]) -> Binding:
    """A model of one layer whose width is its experts' width, so that shapes tell nothing."""
    config = dict(ARCH.tiny[1]) | {"num_hidden_layers": 1, "layer_types": None}
    wanted = expected(ARCH.spec(config))
    shapes = {name: p.shape for name, p in wanted.items() if ".mlp." not in name}
    own = {"router.weight": (4, 64), "router.bias": (4,)} | experts
    shapes |= {f"model.layers.0.mlp.{name}": shape for name, shape in own.items()}
    return bind_huggingface(config, shapes, unread)


def unread(name: str) -> Form:
    raise AssertionError(name)


BIASES = {"experts.gate_up_proj_bias": (4, 128), "experts.down_proj_bias": (4, 64)}


def test_plain_and_mxfp4_stacks_lie_differently() -> None:
    plain = bound(BIASES | {"experts.gate_up_proj": (4, 64, 128), "experts.down_proj": (4, 64, 64)})
    blocks = bound(
        BIASES
        | {"experts.gate_up_proj_blocks": (4, 128, 64), "experts.down_proj_blocks": (4, 64, 64)}
    )
    for suffix, binding, transposed in (("", plain, True), ("_blocks", blocks, False)):
        for part in ("gate_up_proj", "down_proj"):
            held = binding.held[f"model.layers.0.mlp.experts.{part}{suffix}"]
            assert held.transposed == transposed
    pieces = blocks.held["model.layers.0.mlp.experts.gate_up_proj_blocks"].pieces
    rows = {piece.canonical: piece.rows for piece in pieces}
    assert rows["model.layers.0.mlp.experts.1.gate_proj.weight"] == range(128, 256, 2)
    assert rows["model.layers.0.mlp.experts.1.up_proj.weight"] == range(129, 256, 2)
    assert plain.held["model.layers.0.mlp.experts.gate_up_proj"].pieces == pieces


@pytest.mark.parametrize("shape", [(4,), (0, 64, 128), (1 << 40, 64, 128), (2, 2, 64, 64)])
def test_a_stack_that_is_none_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelFileError, match=r"not used by this architecture: .*gate_up_proj"):
        bound(BIASES | {"experts.gate_up_proj": shape, "experts.down_proj": (4, 64, 64)})


def test_a_stack_of_the_wrong_shape_is_named() -> None:
    wrong = BIASES | {"experts.gate_up_proj": (4, 128, 64), "experts.down_proj": (4, 64, 64)}
    with pytest.raises(ModelFileError, match=r"gate_up_proj is \(4, 128, 64\)"):
        bound(wrong)
