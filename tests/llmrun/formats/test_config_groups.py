"""A quantization_config is read as the library means it, and what is not known is named."""

from pathlib import Path

import pytest
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from llmrun.errors import ModelFileError
from llmrun.formats.config_groups import ALL, WeightScheme, parse_config_groups

CONFIG = Path("config.json")
WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS}
BASE = {"format": "pack-quantized", "config_groups": {"g": GROUP}, "ignore": ["lm_head"]}


def test_class_targets_and_asymmetric_groups_are_read() -> None:
    config = parse_config_groups(BASE, CONFIG)
    assert config.groups["g"][0] == WeightScheme("pack-quantized", 4, (1, 128), symmetric=False)
    assert config.owners("model.layers.0.mlp.up_proj") == ["g"]
    assert config.owners("model.layers.0.mlp.up_proj", linear=False) == []
    assert config.owners("lm_head") == []
    assert config.unapplied == ()


READ = {
    "W4A16": ("pack-quantized", 4, (1, 128), ()),
    "W8A16": ("pack-quantized", 8, (1, 128), ()),
    "W4A16_ASYM": ("pack-quantized", 4, (1, 128), ()),
    "W3A16": ("pack-quantized", 3, (1, 128), ()),
    "W8A8": ("int-quantized", 8, (1, ALL), ("8-bit activations",)),
    "W4A8": ("int-quantized", 4, (1, 128), ("8-bit activations",)),
    "W4AFP8": ("pack-quantized", 4, (1, 128), ("8-bit activations",)),
    "FP8": ("float-quantized", 8, (ALL, ALL), ("8-bit activations",)),
    "FP8_DYNAMIC": ("float-quantized", 8, (1, ALL), ("8-bit activations",)),
    "FP8_BLOCK": ("float-quantized", 8, (128, 128), ("8-bit activations",)),
    "NVFP4A16": ("nvfp4-pack-quantized", 4, (1, 16), ()),
    "NVFP4": ("nvfp4-pack-quantized", 4, (1, 16), ("4-bit activations",)),
}


@pytest.mark.parametrize("preset", READ)
def test_the_librarys_own_presets_are_read(preset: str) -> None:
    format, bits, block, unapplied = READ[preset]
    scheme = {"targets": ["Linear"], **PRESET_SCHEMES[preset], "format": format}
    made = QuantizationConfig(config_groups={"group_0": scheme}, format=format, ignore=["lm_head"])
    config = parse_config_groups(made.model_dump(mode="json"), CONFIG)
    found = config.groups["group_0"][0]
    assert (found.format, found.bits, found.block) == (format, bits, block)
    assert found.symmetric is (preset != "W4A16_ASYM")
    assert config.unapplied == unapplied


def test_keys_that_change_nothing_are_let_through() -> None:
    harmless = {"provider": "auto-round", "novelty": None, "future_config": {}, "version": "0.13"}
    assert parse_config_groups({**BASE, **harmless}, CONFIG) == parse_config_groups(BASE, CONFIG)


def test_the_older_name_of_two_formats_is_decided_by_the_type() -> None:
    for kind, format in (("int", "int-quantized"), ("float", "float-quantized")):
        group = {"targets": ["Linear"], "weights": {"type": kind, "strategy": "tensor"}}
        config = parse_config_groups(
            {"format": "naive-quantized", "config_groups": {"g": group}}, CONFIG
        )
        assert config.groups["g"][0] == WeightScheme(format, 8, (ALL, ALL))


@pytest.mark.parametrize(
    ("changes", "block"),
    [
        ({"strategy": None, "group_size": None}, (ALL, ALL)),
        ({"strategy": None, "group_size": -1}, (1, ALL)),
        ({"strategy": None, "group_size": 64}, (1, 64)),
        ({"strategy": "channel", "group_size": None}, (1, ALL)),
    ],
)
def test_a_strategy_that_is_left_out_follows_from_the_group(
    changes: dict[str, object], block: tuple[int, int]
) -> None:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **changes}}
    config = parse_config_groups({**BASE, "config_groups": {"g": group}}, CONFIG)
    assert config.groups["g"][0].block == block


@pytest.mark.parametrize("order", [None, False, "weight", "static", "group", "dynamic", True])
def test_an_order_of_columns_is_remembered(order: object) -> None:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, "actorder": order}}
    config = parse_config_groups({**BASE, "config_groups": {"g": group}}, CONFIG)
    assert config.groups["g"][0].reordered is (order in ("group", "dynamic", True))


def test_zeros_that_are_stored_like_other_weights_are_no_sparsity() -> None:
    sparsity = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}
    assert parse_config_groups({**BASE, "sparsity_config": sparsity}, CONFIG).groups


def _weights(format: str = "pack-quantized", **changes: object) -> dict[str, object]:
    group = {**GROUP, "weights": {**WEIGHTS, **changes}}
    return {"format": format, "config_groups": {"g": group}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({"format": name}, f"format is '{name}'")
            for name in ("marlin-24", "sparse-24-bitmask", "sparse-bitmask", "dense", "new")
        ),
        *(
            ({"format": name}, f"format is '{name}'")
            for name in ("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")
        ),
        ({"format": None}, "format is None"),
        ({"format": "mixed-precision"}, "format is 'mixed-precision'"),
        ({"config_groups": {"g": {**GROUP, "format": "marlin-24"}}}, "format is 'marlin-24'"),
        ({"kv_cache_scheme": "int8"}, "kv_cache_scheme is 'int8'"),
        ({"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"R1": 1}}}, "transform_config"),
        ({"moe_sparsity_config": {"x": 1}}, "moe_sparsity_config"),
        ({"rotation": True}, "quantization_config: rotation is True"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"g": 1}}, "config_groups.g"),
        ({"config_groups": {"g": {**GROUP, "input_activations": 8}}}, "input_activ"),
        ({"config_groups": {"g": {**GROUP, "rotation": 1}}}, "config_groups.g.rotation is 1"),
        ({"config_groups": {"g": {**GROUP, "targets": "Linear"}}}, "targets"),
        ({"config_groups": {"g": {**GROUP, "targets": ["re:(?!a)"]}}}, "pattern"),
        ({"config_groups": {"g": {**GROUP, "weights": None}}}, "weights is None"),
        ({"ignore": [1]}, "ignore"),
        (_weights(num_bits=1), "int of 1 bits"),
        (_weights(num_bits=9), "int of 9 bits"),
        (_weights(num_bits=4.0), "int of 4.0 bits"),
        (_weights(num_bits=True), "int of True bits"),
        (_weights(type="float"), "float of 4 bits"),
        (_weights("float-quantized"), "int of 4 bits"),
        (_weights("float-quantized", type="float", num_bits=8), "symmetric of float-quantized"),
        (_weights("int-quantized", type="float", num_bits=8), "float of 8 bits"),
        (_weights(dynamic=True), "weights.dynamic is True"),
        (_weights(symmetric=1), "symmetric"),
        (_weights(group_size=48), "group_size is 48"),
        (_weights(group_size=True), "group_size is True"),
        (_weights(strategy="token"), "strategy 'token'"),
        (_weights(strategy="tensor_group"), "strategy 'tensor_group'"),
        (_weights(strategy="block", block_structure=[128, 128]), "strategy 'block'"),
        (_weights(block_structure=[128, 128]), "strategy 'group'"),
        (_weights(actorder="column"), "weights.actorder is 'column'"),
        (_weights(rotation=1), "weights.rotation is 1"),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelFileError, match=r"quantization_config|pattern") as caught:
        parse_config_groups({**BASE, **changes}, CONFIG)
    assert words in caught.value.what
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"strategy": "block", "block_structure": [128]}, "strategy 'block'"),
        ({"strategy": "block", "block_structure": [128, 0]}, "strategy 'block'"),
        ({"strategy": "group", "group_size": 0}, "group_size is 0"),
        ({"strategy": "group", "group_size": None}, "group_size is None"),
    ],
)
def test_blocks_of_floats_need_extents(weights: dict[str, object], words: str) -> None:
    group = {"targets": ["Linear"], "weights": {"type": "float", **weights}}
    config = {"format": "float-quantized", "config_groups": {"g": group}}
    with pytest.raises(ModelFileError) as caught:
        parse_config_groups(config, CONFIG)
    assert words in caught.value.what


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ignore": ["re:a"] * 257}, "257 patterns, over 256"),
        ({"config_groups": {f"g{n}": GROUP for n in range(257)}}, "257 groups, over 256"),
        ({"config_groups": {"g": {**GROUP, "targets": ["re:a"] * 999}}}, "999 patterns, over 256"),
    ],
)
def test_more_patterns_than_any_model_has_are_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelFileError, match=words):
        parse_config_groups({**BASE, **changes}, CONFIG)
