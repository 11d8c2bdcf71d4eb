"""Folders with ``quant_method: fp8`` against torch's own E4M3 and the library's dequantizer."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
from safetensors.torch import save_file

from llmrun.errors import ModelFileError
from llmrun.formats.open import open_checkpoint
from llmrun.kernels.forms import Dense, Form

MODULE = "model.layers.0.mlp.experts.3.up_proj"
NAME = f"{MODULE}.weight"
QWEN3 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
Tensors = dict[str, torch.Tensor]


def _folder(path: Path, tensors: Tensors, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    return path


def _codes(n: int, k: int) -> torch.Tensor:
    """Every code there is but the two NaNs, in a random order."""
    codes = torch.randint(0, 256, (n, k), generator=torch.Generator().manual_seed(n * k))
    codes[codes & 127 == 127] = 0
    codes[: n // 2, : k // 2] = 0
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def _scales(*shape: int) -> torch.Tensor:
    scales = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return scales * 1e-3


def _tensors(n: int = 200, k: int = 328) -> Tensors:
    grid = (-(-n // 128), -(-k // 128))
    return {
        NAME: _codes(n, k),
        f"{MODULE}.weight_scale_inv": _scales(*grid),
        "lm_head.weight": torch.ones((2, 3), dtype=torch.bfloat16),
    }


def _floats(form: Form) -> torch.Tensor:
    assert isinstance(form, Dense)
    types = {"f32": torch.float32, "bf16": torch.bfloat16}
    return torch.frombuffer(form.w.data, dtype=types[form.kind]).view(form.shape).float()


@pytest.mark.parametrize("shape", [(256, 128), (200, 328), (1, 8), (129, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_equal_to_the_dequantizer(
    shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = _tensors(*shape)
    scale = tensors[f"{MODULE}.weight_scale_inv"] = tensors[f"{MODULE}.weight_scale_inv"].to(dtype)
    opened = open_checkpoint(_folder(tmp_path, tensors, **QWEN3))
    assert set(opened.tensors) == {NAME, "lm_head.weight"}
    info = opened.tensors[NAME]
    assert (info.kind, info.shape) == ("F8_E4M3 block 128x128", shape)
    assert info.nbytes == tensors[NAME].numel() + scale.nbytes
    assert opened.quantization == "fp8 F8_E4M3 block 128x128"
    (note,) = opened.notes
    assert note.startswith("8-bit activations ")
    assert note.endswith("not applied")
    oracle = FP8BlockDequantizer(targets=["Linear"], dtype=torch.float32)
    expected = oracle.process({NAME: tensors[NAME], f"{MODULE}.weight_scale_inv": scale})[NAME]
    assert torch.equal(_floats(opened.read(NAME)), expected)
    assert opened.read("lm_head.weight").kind == "bf16"


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("activations", ["input_scale", "activation_scale"])
def test_a_scale_of_the_whole_tensor(
    part: str, shape: tuple[int, ...], activations: str, tmp_path: Path
) -> None:
    scale = torch.tensor(0.0123).view(shape)
    tensors = {NAME: _codes(7, 40), f"{MODULE}.{part}": scale}
    tensors[f"{MODULE}.{activations}"] = torch.ones(())
    opened = open_checkpoint(_folder(tmp_path, tensors, **STATIC))
    assert set(opened.tensors) == {NAME}
    assert opened.tensors[NAME].kind == "F8_E4M3 tensor"
    assert torch.equal(_floats(opened.read(NAME)), tensors[NAME].float() * scale)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8, torch.float32])
def test_scales_that_are_powers_of_two(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = _tensors()
    codes = torch.tensor([[100, 127, 130], [120, 90, 113]], dtype=torch.uint8)
    scales = codes.view(torch.float8_e8m0fnu).float()
    stored = scales if dtype is torch.float32 else codes.view(dtype)
    tensors[f"{MODULE}.weight_scale_inv"] = stored
    opened = open_checkpoint(_folder(tmp_path, tensors, **QWEN3, scale_fmt="ue8m0"))
    form = opened.read(NAME)
    assert form.kind == "bf16"
    grid = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :328]
    assert torch.equal(_floats(form), tensors[NAME].float() * grid)


def test_scales_of_a_cache_are_left_out_and_said(tmp_path: Path) -> None:
    tensors = {**_tensors(), "model.layers.0.self_attn.k_scale": torch.ones(())}
    opened = open_checkpoint(_folder(tmp_path, tensors, **QWEN3, kv_cache_scheme="static"))
    assert "8-bit KV cache" in opened.notes[0]
    assert set(opened.tensors) == {NAME, "lm_head.weight"}
    opened = open_checkpoint(_folder(tmp_path, tensors, **QWEN3))
    assert "model.layers.0.self_attn.k_scale" in opened.tensors


def _changed(**parts: torch.Tensor | None) -> Tensors:
    tensors = _tensors()
    for part, tensor in parts.items():
        if tensor is None:
            del tensors[f"{MODULE}.{part}"]
        else:
            tensors[f"{MODULE}.{part}"] = tensor
    return tensors


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (_changed(weight_scale_inv=None), "weight' is F8_E4M3, but tensor"),
        (_changed(weight=None), "weight_scale_inv' is a scale, but its weight is not F8_E4M3"),
        (_changed(weight=torch.ones(200, 328)), "weight_scale_inv' is a scale, but its weight"),
        (_changed(weight_scale=torch.ones(1)), "both scale one weight"),
        (_changed(weight_scale_inv=torch.ones(2, 2)), "weight_scale_inv' is F32 "),
        (_changed(weight_scale_inv=torch.ones(3, 2)), "weight_scale_inv' is F32"),
        (_changed(weight_scale_inv=torch.ones(2, 3).double()), "weight_scale_inv' is F64"),
        (_changed(weight_scale_inv=torch.ones(2, 3).byte()), "weight_scale_inv' is U8"),
        (_changed(weight=_codes(200, 328).float().to(torch.float8_e5m2)), "weight' is F8_E5M2"),
        (_changed(weight=_codes(200, 328)[None]), "expected 2 extents"),
        (_changed(gate_up_proj=_codes(4, 4)), "gate_up_proj' has dtype F8_E4M3, and nothing"),
    ],
)
def test_every_part_is_checked_before_data_is_read(
    tensors: Tensors, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, tensors, **QWEN3))
    assert words in caught.value.what
    assert MODULE in caught.value.what


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"activation_scheme": "other"}, "activation_scheme is 'other'"),
        ({"scale_fmt": "e5m3"}, "scale_fmt"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        ({"weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"weight_block_size": [0, 128]}, "weight_block_size"),
        ({"weight_block_size": 128}, "weight_block_size is 128"),
        ({"weight_transposed": True}, "'weight_transposed' is True"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({"dequantize": 0}, "dequantize is 0"),
    ],
)
def test_what_cannot_be_read_is_named(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, _tensors(), **{**QWEN3, **changes}))
    assert f"quantization_config: {words}" in caught.value.what


@pytest.mark.parametrize(
    "config",
    [
        {**QWEN3, "scale_fmt": "ue8m0"},
        {**QWEN3, "fmt": "float8_e4m3fn", "modules_to_not_convert": None},
        {**QWEN3, "dequantize": False, "novelty": None},
    ],
    ids=["DeepSeek-V3.1", "MiniMax-M2", "a key that is switched off"],
)
def test_published_configs_are_read(config: dict[str, object], tmp_path: Path) -> None:
    assert open_checkpoint(_folder(tmp_path, _tensors(), **config)).tensors[NAME].opened


def test_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    tensors = _tensors()
    tensors[NAME].view(torch.uint8)[1, 5] = 0xFF
    form = open_checkpoint(_folder(tmp_path / "a", tensors, **QWEN3)).read(NAME)
    with pytest.raises(ModelFileError, match=f"{MODULE}.weight' is not finite at element 333"):
        _floats(form)
    codes = torch.full((2, 3), 255, dtype=torch.uint8)
    opened = open_checkpoint(
        _folder(tmp_path / "b", _changed(weight_scale_inv=codes), **QWEN3, scale_fmt="ue8m0")
    )
    with pytest.raises(ModelFileError, match=r"weight_scale_inv' is not finite, .* element 0"):
        opened.read(NAME)


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    file = _folder(tmp_path, _tensors(), **QWEN3) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)
