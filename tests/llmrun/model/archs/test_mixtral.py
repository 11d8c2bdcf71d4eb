"""Mixtral: the published config, what is refused, and its two layouts on disk."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import Heads
from llmrun.model.architecture import find
from llmrun.model.binding import bind_gguf, bind_huggingface
from llmrun.model.parameters import expected
from llmrun.model.spec import MixtureSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
"""mistralai/Mixtral-8x7B-Instruct-v0.1"""

ARCH = find("mixtral")


def test_published_config() -> None:
    spec = ARCH.spec(PUBLISHED)
    assert spec.mixture == MixtureSpec(8, 2, 14336, normalize=True)
    assert spec.heads == Heads(32, 8, 128)
    assert (len(spec.layers), spec.max_positions, spec.norm.eps) == (32, 32768, 1e-5)
    assert all(layer.experts and layer.window is None for layer in spec.layers)


def test_defaults_are_those_of_the_library() -> None:
    sizes = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
    wanted = sizes | {"num_attention_heads", "model_type"}
    bare = ARCH.spec({key: value for key, value in PUBLISHED.items() if key in wanted})
    whole = ARCH.spec(PUBLISHED | {"max_position_embeddings": 131072})
    assert bare == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_shared_experts": 1}, "num_shared_experts"),
        ({"num_experts_per_tok": 9}, "chooses 9 of 8"),
        ({"num_local_experts": 5000}, "num_local_experts"),
        ({"num_experts": 16}, "num_local_experts and num_experts"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        ARCH.spec(PUBLISHED | change)


def unread(name: str) -> Form:
    raise AssertionError(name)


def test_experts_in_stacks_or_one_by_one() -> None:
    config = dict(ARCH.tiny[0])
    wanted = expected(ARCH.spec(config))
    own = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    apart = {}
    for name, parameter in wanted.items():
        published = name
        if ".mlp." in name:
            published = name.replace(".mlp.", ".block_sparse_moe.")
            for canonical, short in own.items():
                published = published.replace(canonical, short)
        apart[published] = parameter.shape
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in apart
    by_name = {
        piece.canonical: piece.rows
        for held in bind_huggingface(config, apart, unread).held.values()
        for piece in held.pieces
    }
    assert by_name == dict.fromkeys(wanted)

    stacked = {name: p.shape for name, p in wanted.items() if "experts" not in name}
    for layer in range(2):
        stacked[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (4, 192, 64)
        stacked[f"model.layers.{layer}.mlp.experts.down_proj"] = (4, 64, 96)
    binding = bind_huggingface(config, stacked, unread)
    pieces = binding.held["model.layers.1.mlp.experts.gate_up_proj"].pieces
    found = {piece.canonical: piece.rows for piece in pieces}
    assert found["model.layers.1.mlp.experts.2.gate_proj.weight"] == range(384, 480)
    assert found["model.layers.1.mlp.experts.2.up_proj.weight"] == range(480, 576)
    assert binding.inexpressible is not None


def test_a_gguf_with_each_expert_in_its_own_tensors_is_refused_by_name() -> None:
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.expert_count": 8,
        "llama.expert_used_count": 2,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
    }
    shapes = {"token_embd.weight": (131, 64), "blk.0.ffn_gate.0.weight": (96, 64)}
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_gate\.0\.weight"):
        bind_gguf(metadata, shapes, unread)
