"""Gemma 3's published config around text and images."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import Heads, Rope
from llmrun.model import frequencies
from llmrun.model.archs.gemma3 import ARCH, spec
from llmrun.model.binding import bind_huggingface

GEMMA_3_4B: dict[str, object] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def test_gemma_3_4b_leaves_out_what_the_library_knows() -> None:
    gemma = spec(GEMMA_3_4B)
    assert (gemma.architecture, gemma.vocab, gemma.heads) == ("gemma3", 262208, Heads(8, 4, 256))
    assert (gemma.tied, gemma.max_positions) == (True, 131072)
    assert [layer.window for layer in gemma.layers[:7]] == [1024] * 5 + [None, 1024]
    assert gemma.layers[5].rope == Rope(frequencies.linear(1_000_000.0, 256, 8.0))


@pytest.mark.parametrize(
    "change",
    [
        {"mystery": 1},
        {"text_config": {"mystery": 1}},
        {"text_config": {"model_type": "llama"}},
        {"text_config": [1]},
    ],
)
def test_what_it_does_not_know_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=r"mystery|llama|text_config"):
        spec(GEMMA_3_4B | change)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_tensors_of_both_layouts(prefix: str) -> None:
    tiny = dict(ARCH.tiny[0])
    wanted = bind_names(tiny)
    shapes = {name.replace("model.", prefix, 1): shape for name, shape in wanted.items()}
    eyes = ("vision_tower.encoder.weight", "model.multi_modal_projector.mm_soft_emb_norm.weight")
    binding = bind_huggingface(tiny, shapes | dict.fromkeys(eyes, (4,)), unread)
    assert {p.canonical for held in binding.held.values() for p in held.pieces} == {
        name.replace("post_attention_layernorm", "post_self_attn_layernorm")
        .replace("pre_feedforward_layernorm", "post_attention_layernorm")
        .replace("post_feedforward_layernorm", "post_mlp_layernorm")
        for name in wanted
    }
    assert binding.unused == dict.fromkeys(eyes, "images are not read")
    with pytest.raises(ModelFileError, match="audio_tower"):
        bind_huggingface(tiny, shapes | {"audio_tower.weight": (4,)}, unread)


def unread(name: str) -> Form:
    raise AssertionError(name)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_what_is_written_is_the_text_model_alone(prefix: str) -> None:
    # A folder that calls itself a model with eyes but has none loads in no other engine.
    tiny = dict(ARCH.tiny[0]) | {"eos_token_id": [1, 106]}
    wanted = bind_names(tiny)
    shapes = {name.replace("model.", prefix, 1): shape for name, shape in wanted.items()}
    binding = bind_huggingface(tiny, shapes | {"vision_tower.encoder.weight": (4,)}, unread)
    assert set(binding.published.values()) == set(wanted)
    assert binding.config["model_type"] == "gemma3_text"
    assert binding.config["architectures"] == ["Gemma3ForCausalLM"]
    assert binding.config["eos_token_id"] == [1, 106]  # said outside only
    assert bind_huggingface(binding.config, wanted, unread).parameters == binding.parameters


def bind_names(tiny: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Tensors of the tiny model's decoder, written out."""
    assert isinstance(tiny["text_config"], dict)
    hidden, inner, vocab = 64, 96, 131
    queries, keys = 4 * 32, 2 * 32
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (32,),
        "self_attn.k_norm": (32,),
        "post_attention_layernorm": (hidden,),
        "pre_feedforward_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "post_feedforward_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(tiny["text_config"]["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{part}.weight": dims for part, dims in layer.items()}
    return shapes
