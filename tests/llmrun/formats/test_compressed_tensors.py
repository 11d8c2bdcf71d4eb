"""Which module a config means, what is listed of it, and what is said of the rest."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmrun.errors import ModelFileError
from llmrun.formats.open import open_checkpoint

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"


@pytest.fixture
def w4(ct: SimpleNamespace) -> Any:
    return ct.scheme("pack-quantized", 4, strategy="group", group_size=32)


@pytest.fixture
def w8(ct: SimpleNamespace) -> Any:
    return ct.scheme("int-quantized", 8, strategy="channel")


@pytest.fixture
def f8(ct: SimpleNamespace) -> Any:
    return ct.scheme("float-quantized", 8, "float", strategy="tensor")


def _group(scheme: Any, **changes: object) -> dict[str, object]:
    return {**json.loads(scheme.model_dump_json()), **changes}


def _parts(ct: SimpleNamespace, scheme: Any) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor] = ct.compressed(scheme, 16, 64, torch.bfloat16)[0]
    return parts


def test_a_pattern_goes_before_a_class_as_in_the_library(
    ct: SimpleNamespace, w4: Any, tmp_path: Path
) -> None:
    groups = {
        "a": _group(w4, weights={"num_bits": 8, "strategy": "channel"}),
        "b": _group(w4, targets=["re:.*up_proj$"]),
    }
    opened = open_checkpoint(ct.folder(tmp_path, _parts(ct, w4), w4, config_groups=groups))
    assert opened.tensors[NAME].kind == "int4 g32"
    groups = {"a": _group(w4, targets=["re:.*up_proj$"]), "b": _group(w4, targets=[MODULE])}
    groups["a"] = {**groups["a"], "weights": {"num_bits": 8, "strategy": "channel"}}
    opened = open_checkpoint(ct.folder(tmp_path, _parts(ct, w4), w4, config_groups=groups))
    assert opened.tensors[NAME].kind == "int4 g32"


def test_each_quantized_module_needs_exactly_one_scheme(
    ct: SimpleNamespace, w4: Any, tmp_path: Path
) -> None:
    parts = _parts(ct, w4)
    two = {
        "a": _group(w4, targets=["re:.*mlp.*"]),
        "b": _group(w4, targets=["re:.*up_proj$"]),
    }
    assert open_checkpoint(ct.folder(tmp_path, parts, w4, config_groups=two)).tensors[NAME]
    two["b"] = {**two["b"], "weights": {"num_bits": 4, "strategy": "channel"}}
    with pytest.raises(ModelFileError, match=f"'{MODULE}' is quantized, but 2 groups"):
        open_checkpoint(ct.folder(tmp_path, parts, w4, config_groups=two))
    with pytest.raises(ModelFileError, match=f"'{MODULE}' is quantized, but no group"):
        open_checkpoint(ct.folder(tmp_path, parts, w4, ignore=["re:.*up_proj$"]))
    groups = {"a": _group(w4, targets=["Embedding", "model.layers.1.mlp.up_proj"])}
    with pytest.raises(ModelFileError, match="no group of the config match it"):
        open_checkpoint(ct.folder(tmp_path, parts, w4, config_groups=groups))


def test_groups_of_several_formats_make_one_model(
    ct: SimpleNamespace, w4: Any, w8: Any, f8: Any, tmp_path: Path
) -> None:
    modules = {"": w4, ".second": w8, ".third": f8}
    stored = {}
    for suffix, scheme in modules.items():
        parts = _parts(ct, scheme)
        stored |= {f"{suffix}.{name}".removeprefix("."): part for name, part in parts.items()}
    groups = {
        f"group_{index}": _group(scheme, targets=[f"{MODULE}{suffix}"])
        for index, (suffix, scheme) in enumerate(modules.items())
    }
    opened = open_checkpoint(
        ct.folder(tmp_path, stored, w4, format="mixed-precision", config_groups=groups)
    )
    assert {name: info.kind for name, info in opened.tensors.items()} == {
        NAME: "int4 g32",
        f"{MODULE}.second.weight": "int8 row",
        f"{MODULE}.third.weight": "F8_E4M3 tensor",
        "lm_head.weight": "F32",
    }
    assert opened.quantization == "compressed-tensors F8_E4M3 tensor, int4 g32, int8 row"
    for name in opened.tensors:
        assert opened.read(name).shape == opened.tensors[name].shape
    del groups["group_2"]["format"]
    with pytest.raises(ModelFileError, match="format is 'mixed-precision'"):
        open_checkpoint(
            ct.folder(tmp_path, stored, w4, format="mixed-precision", config_groups=groups)
        )


def test_a_weight_in_another_format_than_its_groups_is_refused(
    ct: SimpleNamespace, w4: Any, w8: Any, f8: Any, tmp_path: Path
) -> None:
    for stored, stated, words in (
        (w4, w8, f"{NAME}' is missing"),
        (w8, w4, f"{MODULE}.weight_packed' is missing"),
        (w8, f8, f"{NAME}' is I8"),
        (f8, w8, f"{NAME}' is F8_E4M3"),
    ):
        with pytest.raises(ModelFileError) as caught:
            open_checkpoint(ct.folder(tmp_path, _parts(ct, stored), stated))
        assert words in caught.value.what


@pytest.mark.parametrize("scheme", ["w4", "w8", "f8"])
def test_a_plain_weight_that_the_config_names_is_refused(
    ct: SimpleNamespace, scheme: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    chosen = request.getfixturevalue(scheme)
    chosen.targets = ["re:.*mlp.*"]
    missing = "weight_packed" if scheme == "w4" else "weight_scale"
    with pytest.raises(ModelFileError, match=f"stored plain, .*{MODULE}.{missing}' is missing"):
        open_checkpoint(ct.folder(tmp_path, {"weight": torch.zeros(16, 64)}, chosen))
    norm = {**_parts(ct, chosen), "norm.weight": torch.ones(64)}
    opened = open_checkpoint(ct.folder(tmp_path, norm, chosen))
    assert opened.tensors[f"{MODULE}.norm.weight"].kind == "F32"


def test_packed_and_plain_at_once_is_refused(ct: SimpleNamespace, w4: Any, tmp_path: Path) -> None:
    parts = {**_parts(ct, w4), "weight": torch.zeros(16, 64)}
    with pytest.raises(ModelFileError, match="both packed and plain"):
        open_checkpoint(ct.folder(tmp_path, parts, w4))


def test_experts_are_modules_like_any_other(ct: SimpleNamespace, w8: Any, tmp_path: Path) -> None:
    parts = _parts(ct, w8)
    stored = {
        f"experts.{expert}.gate_proj.{name}": part.clone()
        for expert in range(3)
        for name, part in parts.items()
    }
    opened = open_checkpoint(ct.folder(tmp_path, stored, w8))
    for expert in range(3):
        info = opened.tensors[f"{MODULE}.experts.{expert}.gate_proj.weight"]
        assert (info.kind, info.shape) == ("int8 row", (16, 64))


def test_activations_and_caches_are_left_out_and_said(
    ct: SimpleNamespace, w8: Any, tmp_path: Path
) -> None:
    eight = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    scales = {"input_scale": torch.ones(1), "k_scale": torch.ones(1)}
    stored = {**_parts(ct, w8), **scales}
    groups = {"g": _group(w8, input_activations=eight)}
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    opened = open_checkpoint(
        ct.folder(tmp_path, stored, w8, config_groups=groups, kv_cache_scheme=cache)
    )
    assert opened.quantization == "compressed-tensors int8 row"
    (note,) = opened.notes
    assert note.startswith("8-bit activations and 8-bit KV cache")
    assert note.endswith("not applied")
    assert set(opened.tensors) == {NAME, "lm_head.weight"}
    # What the config does not speak of is no scale of ours to drop.
    opened = open_checkpoint(ct.folder(tmp_path, stored, w8))
    assert opened.quantization == "compressed-tensors int8 row"
    assert {f"{MODULE}.{name}" for name in scales} < set(opened.tensors)


@pytest.mark.parametrize("keep", [1, 100, -1])
def test_a_file_that_is_cut_is_refused(
    ct: SimpleNamespace, w8: Any, keep: int, tmp_path: Path
) -> None:
    file = ct.folder(tmp_path, _parts(ct, w8), w8) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)
