"""A config of Ministral 8B with a window in three layers of four."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.archs.ministral import spec

TYPES = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 9
MINISTRAL_8B: dict[str, object] = {
    "architectures": ["MinistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": TYPES,
    "max_position_embeddings": 32768,
    "model_type": "ministral",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
    "use_cache": True,
    "vocab_size": 131072,
}


def test_ministral_8b() -> None:
    ministral = spec(MINISTRAL_8B)
    assert (ministral.heads, ministral.tied) == (Heads(32, 8, 128), False)
    assert [layer.window for layer in ministral.layers] == [None, 32768, 32768, 32768] * 9


def test_without_layer_types_the_window_decides() -> None:
    bare = MINISTRAL_8B | {"layer_types": None}
    assert {layer.window for layer in spec(bare).layers} == {32768}
    assert {layer.window for layer in spec(bare | {"sliding_window": None}).layers} == {None}
    absent = {key: value for key, value in bare.items() if key != "sliding_window"}
    assert {layer.window for layer in spec(absent).layers} == {4096}


@pytest.mark.parametrize("change", [{"mystery": 1}, {"layer_types": TYPES[1:]}])
def test_what_it_does_not_know_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=next(iter(change))):
        spec(MINISTRAL_8B | change)
