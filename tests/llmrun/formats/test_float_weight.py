"""Float weights made by the library, read as the library itself decompresses them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8

from llmrun.errors import ModelFileError
from llmrun.formats.open import open_checkpoint
from llmrun.kernels.forms import Dense, GroupInt

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
SPANS: dict[str, dict[str, object]] = {
    "tensor": {"strategy": "tensor"},
    "row": {"strategy": "channel"},
    "g24": {"strategy": "group", "group_size": 24},
    "block 16x32": {"strategy": "block", "block_structure": [16, 32]},
    "block 8x200": {"strategy": "block", "block_structure": [8, 200]},
}


@pytest.mark.parametrize("shape", [(16, 96), (13, 120), (1, 24)])
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float8_is_equal_to_the_library_in_fp32(
    ct: SimpleNamespace, shape: tuple[int, int], span: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    scheme = ct.scheme("float-quantized", 8, "float", **SPANS[span])
    parts, rounded = ct.compressed(scheme, *shape, dtype)
    assert parts["weight"].dtype is torch.float8_e4m3fn
    opened = open_checkpoint(ct.folder(tmp_path, parts, scheme))
    assert opened.tensors[NAME].kind == f"F8_E4M3 {span}"
    assert opened.tensors[NAME].shape == shape
    assert opened.quantization == f"compressed-tensors F8_E4M3 {span}"
    form = opened.read(NAME)
    assert isinstance(form, Dense)
    assert form.kind == "f32"
    parts["weight_scale"] = parts["weight_scale"].float()
    exact = ct.decompressed(parts, scheme)
    assert torch.equal(ct.weights(form).float(), exact)
    assert torch.equal(ct.weights(form).to(dtype), rounded)


def test_scales_that_are_powers_of_two_need_16_bits_only(
    ct: SimpleNamespace, tmp_path: Path
) -> None:
    scheme = ct.scheme("float-quantized", 8, "float", **SPANS["row"])
    parts, _ = ct.compressed(scheme, 9, 64, torch.float32)
    parts["weight_scale"] = torch.exp2(parts["weight_scale"].abs().log2().round())
    parts["weight_scale"][1] *= -1
    parts["weight_scale"][2] = 0
    form = open_checkpoint(ct.folder(tmp_path, parts, scheme)).read(NAME)
    assert form.kind == "bf16"
    assert torch.equal(ct.weights(form).float(), ct.decompressed(parts, scheme))


@pytest.mark.parametrize("shape", [(5, 64), (16, 16)])
def test_nvfp4_is_equal_to_the_library_in_fp32(
    ct: SimpleNamespace, shape: tuple[int, int], tmp_path: Path
) -> None:
    scheme = ct.scheme("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16)
    parts, _ = ct.compressed(scheme, *shape, torch.float32, True)
    assert parts["weight_scale"].dtype is torch.float8_e4m3fn
    opened = open_checkpoint(ct.folder(tmp_path, parts, scheme))
    form = opened.read(NAME)
    assert isinstance(form, GroupInt)
    assert opened.tensors[NAME].kind == form.kind == "int8 g16"
    assert opened.tensors[NAME].shape == form.shape == shape
    scales = parts["weight_scale"].float() / parts["weight_global_scale"]
    values = unpack_fp4_from_uint8(parts["weight_packed"], *shape).float()
    exact = values * scales.repeat_interleave(16, dim=1)
    assert torch.equal(ct.weights(form).float(), exact)
    assert torch.equal(exact.bfloat16(), ct.decompressed(parts, scheme))
    assert len(exact.unique()) > 15


Parts = dict[str, torch.Tensor]
Change = Callable[[Parts], object]


def _cast(name: str, dtype: torch.dtype) -> Change:
    return lambda parts: parts.update({name: parts[name].to(dtype)})


def _faults(names: tuple[str, ...]) -> Iterator[tuple[str, Change, str]]:
    for name in names:
        yield f"missing {name}", lambda parts, name=name: parts.pop(name), f"{name}' is missing"
        yield (
            f"cut {name}",
            lambda parts, name=name: parts.update({name: parts[name][:-1]}),
            f"{MODULE}.weight",
        )


def _float8_faults() -> Iterator[tuple[str, Change, str]]:
    yield from _faults(("weight", "weight_scale"))
    yield "another float", _cast("weight", torch.float8_e5m2), "weight' is F8_E5M2"
    yield "integers", lambda p: p.update(weight=p["weight"].view(torch.int8)), "weight' is I8"
    yield "scales as f64", _cast("weight_scale", torch.float64), "weight_scale' is F64"
    scales = torch.ones((3, 3), dtype=torch.uint8)
    yield "scales as u8", lambda p: p.update(weight_scale=scales), "weight_scale' is U8"
    yield "a stack", lambda p: p.update(weight=p["weight"][None]), "expected 2 extents"
    zero = torch.zeros((3, 3), dtype=torch.int8)
    yield "zero point", lambda p: p.update(weight_zero_point=zero), "zero_point' is no part"


def _nvfp4_faults() -> Iterator[tuple[str, Change, str]]:
    yield from _faults(("weight_packed", "weight_scale", "weight_global_scale"))
    yield "codes as i8", _cast("weight_packed", torch.int8), "weight_packed' is I8"
    yield "scales as bf16", _cast("weight_scale", torch.bfloat16), "weight_scale' is BF16"
    yield "global as f16", _cast("weight_global_scale", torch.float16), "global_scale' is F16"
    narrow = torch.zeros((33, 4), dtype=torch.uint8)
    yield "narrow", lambda p: p.update(weight_packed=narrow), "not in groups of 16"


@pytest.mark.parametrize(
    ("format", "change", "words"),
    [
        pytest.param(format, change, words, id=f"{format} {name}")
        for format, faults in (("float", _float8_faults()), ("nvfp4", _nvfp4_faults()))
        for name, change, words in faults
    ],
)
def test_every_part_is_checked_before_data_is_read(
    ct: SimpleNamespace, format: str, change: Change, words: str, tmp_path: Path
) -> None:
    if format == "float":
        scheme = ct.scheme("float-quantized", 8, "float", **SPANS["block 16x32"])
    else:
        scheme = ct.scheme(
            "nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16
        )
    parts, _ = ct.compressed(scheme, 33, 96, torch.float32, format == "nvfp4")
    change(parts)
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(ct.folder(tmp_path, parts, scheme))
    assert words in caught.value.what


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_weight_that_is_not_finite_is_named(
    ct: SimpleNamespace, code: int, tmp_path: Path
) -> None:
    scheme = ct.scheme("float-quantized", 8, "float", **SPANS["tensor"])
    parts, _ = ct.compressed(scheme, 3, 32, torch.float32)
    parts["weight"].view(torch.uint8)[1, 2] = code
    form = open_checkpoint(ct.folder(tmp_path, parts, scheme)).read(NAME)
    with pytest.raises(ModelFileError, match=r"up_proj.weight' is not finite at element 34"):
        _ = form.arrays["w"].data


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e38])
def test_a_scale_that_is_not_finite_is_named(
    ct: SimpleNamespace, scale: float, tmp_path: Path
) -> None:
    scheme = ct.scheme("float-quantized", 8, "float", **SPANS["row"])
    parts, _ = ct.compressed(scheme, 3, 32, torch.float32)
    parts["weight_scale"][1] = scale
    opened = open_checkpoint(ct.folder(tmp_path, parts, scheme))
    with pytest.raises(ModelFileError, match=r"weight_scale' is not finite, .* element 1"):
        opened.read(NAME)


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ("weight_scale", 0x7F, "weight_scale' is not finite at element 0"),
        ("weight_global_scale", 0, ""),
    ],
)
def test_nvfp4_scales_that_are_not_finite_are_named(
    ct: SimpleNamespace, part: str, code: int, words: str, tmp_path: Path
) -> None:
    scheme = ct.scheme("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16)
    parts, _ = ct.compressed(scheme, 3, 32, torch.float32, True)
    parts[part].view(torch.uint8).view(-1)[: parts[part].element_size()] = code
    opened = open_checkpoint(ct.folder(tmp_path, parts, scheme))
    with pytest.raises(ModelFileError) as caught:
        opened.read(NAME)
    assert MODULE in caught.value.what
    assert words in caught.value.what
