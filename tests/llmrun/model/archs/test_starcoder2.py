"""StarCoder 2: the published config of the 3B, its GGUF form, and what is refused."""

from collections.abc import Callable
from typing import Any

import gguf
import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.archs.starcoder2 import spec
from llmrun.model.parameters import expected
from llmrun.model.spec import NormSpec

PUBLISHED: dict[str, object] = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "initializer_range": 0.018042,
    "intermediate_size": 12288,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "transformers_version": "4.37.0.dev0",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}


def test_published_config() -> None:
    coder = spec(PUBLISHED)
    assert coder.heads == Heads(24, 2, 128)
    assert coder.norm == NormSpec(1e-5, centered=True, bias=True)
    assert (coder.gated, coder.activation, coder.tied) == (False, "gelu_tanh", True)
    assert (coder.qkv_bias, coder.output_bias, coder.mlp_bias) == (True, True, True)
    assert {layer.window for layer in coder.layers} == {4096}
    parameters = expected(coder)
    assert "model.norm.bias" in parameters
    assert not any("gate_proj" in name for name in parameters)


@pytest.mark.parametrize(
    "change", [{"norm_type": "rms_norm"}, {"mlp_type": "gated"}, {"alibi": True}]
)
def test_other_values_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change))):
        spec(PUBLISHED | change)


def test_gguf(gguf_config: Callable[..., Any], named_back: Callable[..., None]) -> None:
    file = {
        "block_count": 30,
        "context_length": 16384,
        "embedding_length": 3072,
        "feed_forward_length": 12288,
        "attention.head_count": 24,
        "attention.head_count_kv": 2,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 999999.4420358813,
    }
    tensors = {"token_embd.weight": (49152, 3072), "blk.0.attn_q.bias": (3072,)}
    assert spec(gguf_config("starcoder2", file, tensors)) == spec(PUBLISHED)
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + ["mlp.c_fc", "mlp.c_proj"]
    parts += ["input_layernorm", "post_attention_layernorm"]
    named_back(gguf.MODEL_ARCH.STARCODER2, parts)
