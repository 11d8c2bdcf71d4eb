"""Foreign configs: bounded, typed, and unknown keys refused by name."""

import json

import pytest
from transformers import CONFIG_MAPPING

from llmrun.errors import ModelFileError
from llmrun.model.architecture import architectures, find, find_gguf

LLAMA = dict(architectures()["llama"].tiny[0])
CASES = [(name, dict(arch.tiny[0])) for name, arch in architectures().items()]
PLAIN = [(name, config) for name, config in CASES if "text_config" not in config]
DENSE = {"num_local_experts": 0, "layer_types": ["full_attention"] * 30}


@pytest.mark.parametrize(("name", "config"), CASES, ids=[name for name, _ in CASES])
@pytest.mark.parametrize(
    "change",
    [
        {"some_new_scaling": True},
        {"hidden_act": "relu6"},
        {"is_encoder_decoder": True},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mystery": 2}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_mathematics_is_refused_by_name(
    name: str, config: dict[str, object], change: dict[str, object]
) -> None:
    arch = find(name)
    arch.spec(config)
    with pytest.raises(ModelFileError) as refused:
        arch.spec(config | change)
    value = next(iter(change.values()))
    names = {next(iter(change)), "spiral", "mystery"}
    assert any(n in refused.value.what for n in names), (refused.value.what, value)
    assert refused.value.next_step


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 2**31),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("num_attention_heads", 0),
        ("num_attention_heads", 3),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", True),
        ("vocab_size", 10**9),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 0),
        ("tie_word_embeddings", 1),
        ("max_position_embeddings", 2**40),
        ("head_dim", 7),
        ("rope_parameters", [1]),
    ],
)
def test_absurd_or_wrong_typed_values_are_refused(key: str, value: object) -> None:
    with pytest.raises(ModelFileError):
        find("llama").spec(LLAMA | {key: value})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_size_is_named(key: str) -> None:
    config = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ModelFileError, match=f"lacks {key}"):
        find("llama").spec(config)


def test_r098_null_counts_as_absent() -> None:
    spec = find("llama").spec(LLAMA | {"head_dim": None, "rope_scaling": None})
    assert spec.heads.head_dim == 16


def test_r097_r099_head_dim_need_not_be_hidden_over_heads() -> None:
    spec = find("llama").spec(LLAMA | {"hidden_size": 72, "head_dim": 32})
    assert (spec.hidden, spec.heads.head_dim) == (72, 32)


def test_private_notes_of_the_library_do_not_matter() -> None:
    find("llama").spec(LLAMA | {"_name_or_path": "x", "transformers_version": "5.0"})


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ModelFileError, match="'mamba'") as refused:
        find("mamba")
    assert "llama" in refused.value.next_step
    with pytest.raises(ModelFileError, match="'mamba'") as refused:
        find_gguf({"general.architecture": "mamba"})
    assert "llama" in refused.value.next_step


def test_mistral_window_counts_for_every_layer() -> None:
    mistral = architectures()["mistral"]
    spec = mistral.spec(dict(mistral.tiny[0]) | {"sliding_window": 4096})
    assert [layer.window for layer in spec.layers] == [4096, 4096]


def test_qwen_windows_start_at_max_window_layers_and_only_if_used() -> None:
    config = dict(architectures()["qwen2"].tiny[0]) | {"sliding_window": 20, "max_window_layers": 1}
    assert [x.window for x in find("qwen2").spec(config).layers] == [None, None]
    used = config | {"use_sliding_window": True}
    assert [x.window for x in find("qwen2").spec(used).layers] == [None, 20]
    with pytest.raises(ModelFileError, match="layer_types"):
        find("qwen2").spec(used | {"layer_types": ["full_attention"] * 2})


@pytest.mark.parametrize(("name", "config"), PLAIN, ids=[name for name, _ in PLAIN])
@pytest.mark.parametrize("more", [{}, {"use_sliding_window": True}], ids=["plain", "windows"])
def test_absent_keys_mean_what_transformers_takes_for_them(
    name: str, config: dict[str, object], more: dict[str, object]
) -> None:
    # Saved configs leave out what equals the library's default.
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    minimal = {k: config[k] for k in (*sizes, "vocab_size", "model_type")}
    minimal |= {"num_attention_heads": 32, "hidden_size": 320, "num_hidden_layers": 30}
    if name.startswith("qwen"):
        minimal |= more
    if name == "granitemoehybrid":  # by default of layers that are refused
        minimal |= DENSE
    filled = json.loads(CONFIG_MAPPING[name](**minimal).to_json_string(use_diff=False))
    saved = {key: filled[key] for key in filled if key in find_known(name)}
    assert find(name).spec(minimal) == find(name).spec(saved)


def find_known(name: str) -> set[str]:
    """Keys a spec depends on."""
    return {
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling", "tie_word_embeddings",
        "attention_bias", "mlp_bias", "hidden_act", "sliding_window", "use_sliding_window",
        "max_window_layers", "layer_types", "num_local_experts",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "reached"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"rope_type": "dynamic", "factor": 2.0}, 65_536),
        ({"rope_type": "linear", "factor": 2.0}, 32_768),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_stretched_context_is_offered(rope: dict[str, object], reached: int) -> None:
    # As Qwen 2.5's model cards advise: max_position_embeddings stays what it was.
    config = LLAMA | {"max_position_embeddings": 32_768, "rope_scaling": rope}
    del config["rope_parameters"]
    assert find("llama").spec(config).max_positions == reached


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2"])
def test_a_partial_rotation_that_transformers_ignores_is_refused(name: str) -> None:
    config = dict(architectures()[name].tiny[0]) | {"partial_rotary_factor": 0.5}
    with pytest.raises(ModelFileError, match="partial_rotary_factor"):
        find(name).spec(config)
    find(name).spec(config | {"partial_rotary_factor": 1.0})


def test_numbers_of_no_model_are_refused_by_name() -> None:
    with pytest.raises(ModelFileError, match="logits_scaling"):
        find("granite").spec(dict(architectures()["granite"].tiny[0]) | {"logits_scaling": 1e-300})
