"""Published configs around text and images: Mistral Small 3.1 and Ministral 3."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads, Rope
from llmrun.model import frequencies
from llmrun.model.archs import ministral3
from llmrun.model.archs.mistral3 import spec

SMALL_3_1: dict[str, object] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024},
    "vision_feature_layer": -1,
}


def test_mistral_small_3_1() -> None:
    small = spec(SMALL_3_1)
    assert (small.architecture, small.heads, small.tied) == ("mistral3", Heads(32, 8, 128), False)
    assert small.layers[0].rope == Rope(frequencies.base(1e9, 128))
    assert {layer.window for layer in small.layers} == {None}


@pytest.mark.parametrize(
    ("outside", "inside", "tied"),
    [({}, {}, False), ({}, {"tie_word_embeddings": True}, True)]
    + [({"tie_word_embeddings": t}, {"tie_word_embeddings": not t}, t) for t in (True, False)],
)
def test_the_head_is_tied_as_said_outside_or_inside(
    outside: dict[str, object], inside: dict[str, object], tied: bool
) -> None:
    text = {**dict(ministral3.ARCH.tiny[0]), **inside}
    if not inside:
        del text["tie_word_embeddings"]
    assert spec(SMALL_3_1 | outside | {"text_config": text}).tied is tied


@pytest.mark.parametrize(
    "change", [{"mystery": 1}, {"text_config": {"model_type": "mistral4"}}, {"text_config": None}]
)
def test_what_it_does_not_know_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=r"mystery|mistral4|hidden_size"):
        spec(SMALL_3_1 | change)
