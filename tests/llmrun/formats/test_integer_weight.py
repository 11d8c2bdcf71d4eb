"""Integer weights made by the library, read as the library itself decompresses them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from llmrun.errors import ModelFileError
from llmrun.formats.open import open_checkpoint
from llmrun.kernels.forms import Dense, Form, GroupInt
from llmrun.kernels.host import DType

MODULE = "model.layers.0.mlp.up_proj"
SPANS: dict[str, dict[str, object]] = {
    "tensor": {"strategy": "tensor"},
    "row": {"strategy": "channel"},
    **{f"g{size}": {"strategy": "group", "group_size": size} for size in (16, 32, 64, 128)},
}


def _read(folder: Path) -> Form:
    opened = open_checkpoint(folder)
    name = f"{MODULE}.weight"
    assert set(opened.tensors) == {name, "lm_head.weight"}
    form = opened.read(name)
    assert opened.tensors[name].kind == form.kind
    assert opened.tensors[name].shape == form.shape
    assert form.kind in str(opened.quantization)
    assert isinstance(opened.read("lm_head.weight"), Dense)
    return form


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("span", ["row", "g32", "g128"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_is_equal_to_the_library(
    ct: SimpleNamespace, bits: int, span: str, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    scheme = ct.scheme("pack-quantized", bits, symmetric=symmetric, **SPANS[span])
    parts, expected = ct.compressed(scheme, 13, 256, dtype)
    form = _read(ct.folder(tmp_path, parts, scheme))
    assert isinstance(form, GroupInt)
    assert form.bits == (4 if bits <= 4 else 8)
    assert torch.equal(ct.weights(form).to(dtype), expected)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("span", ["tensor", "row", "g32", "g64"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_is_equal_to_the_library(
    ct: SimpleNamespace, bits: int, span: str, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    scheme = ct.scheme("int-quantized", bits, symmetric=symmetric, **SPANS[span])
    parts, expected = ct.compressed(scheme, 7, 192, dtype)
    assert parts["weight"].dtype is torch.int8
    form = _read(ct.folder(tmp_path, parts, scheme))
    assert isinstance(form, GroupInt)
    if dtype is torch.float32:  # the library rounds (q - z) * s once, the form s * u and s * z
        torch.testing.assert_close(ct.weights(form), expected.double(), rtol=1e-6, atol=2e-5)
    else:
        assert torch.equal(ct.weights(form).to(dtype), expected)


def test_a_scale_of_the_whole_tensor_serves_each_row(ct: SimpleNamespace, tmp_path: Path) -> None:
    scheme = ct.scheme("pack-quantized", 4, **SPANS["tensor"])
    parts, expected = ct.compressed(scheme, 5, 64, torch.float16)
    for shape in ((1,), ()):
        parts["weight_scale"] = parts["weight_scale"].reshape(shape)
        form = _read(ct.folder(tmp_path, parts, scheme))
        assert form.kind == "int4 row"
        assert torch.equal(ct.weights(form).half(), expected)


def test_codes_and_scales_of_4_bits_are_views_of_the_file(
    ct: SimpleNamespace, tmp_path: Path
) -> None:
    scheme = ct.scheme("pack-quantized", 4, **SPANS["g32"])
    parts, _ = ct.compressed(scheme, 4, 64, torch.float16)
    opened = open_checkpoint(ct.folder(tmp_path, parts, scheme))
    one, two = (opened.read(f"{MODULE}.weight") for _ in range(2))
    assert bytes(one.arrays["codes"].data) == parts["weight_packed"].numpy().tobytes()
    one.arrays["codes"].data[0] ^= 255
    one.arrays["scales"].data[0] ^= 1
    assert bytes(two.arrays["codes"].data) == bytes(one.arrays["codes"].data)
    assert bytes(two.arrays["scales"].data) == bytes(one.arrays["scales"].data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
def test_zero_points_take_a_byte_beside_scales_of_16_bits(
    format: str, dtype: torch.dtype, ct: SimpleNamespace, tmp_path: Path
) -> None:
    scheme = ct.scheme(format, 8, symmetric=False, **SPANS["g32"])
    parts, _ = ct.compressed(scheme, 13, 64, dtype)
    form = _read(ct.folder(tmp_path, parts, scheme))
    assert isinstance(form, GroupInt)
    assert form.mins is not None
    wide = dtype is torch.float32
    assert form.kind == f"int8 g32 +{'min' if wide else 'zero'}"
    assert form.mins.dtype is (DType.F32 if wide else DType.U8)
    assert form.scales.nbytes == 13 * 2 * dtype.itemsize


Parts = dict[str, torch.Tensor]
Change = Callable[[Parts], object]


def _cast(name: str, dtype: torch.dtype) -> Change:
    return lambda parts: parts.update({name: parts[name].to(dtype)})


def _cut(name: str) -> Change:
    return lambda parts: parts.update({name: parts[name][:-1]})


def _drop(name: str) -> Change:
    return lambda parts: parts.pop(name)


def _add(**tensors: torch.Tensor) -> Change:
    return lambda parts: parts.update(tensors)


def _packed_faults() -> Iterator[tuple[str, Change, str]]:
    for name in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"):
        yield f"missing {name}", _drop(name), f"{MODULE}.{name}' is missing"
        yield f"cut {name}", _cut(name), f"{MODULE}.{name}' is"
    yield "scale as f64", _cast("weight_scale", torch.float64), "weight_scale' is F64"
    yield "codes as i64", _cast("weight_packed", torch.int64), "weight_packed' is I64"
    yield "zero points as i16", _cast("weight_zero_point", torch.int16), "weight_zero_point' is I16"
    yield "shape as f32", _cast("weight_shape", torch.float32), "weight_shape' is F32"
    for shape in ([16, 63], [0, 64], [-16, 64], [2**62, 64], [16, 32]):
        yield f"shape {shape}", _add(weight_shape=torch.tensor(shape)), MODULE
    order = torch.arange(64, dtype=torch.int32) // 16
    yield "groups that are not", _add(weight_g_idx=order), "weight_g_idx' names group 2 of 2 at 32"
    yield "index as i64", _add(weight_g_idx=order.long()), "weight_g_idx' is I64"
    extra = _add(weight_global_scale=torch.ones(1))
    yield "global scale", extra, "weight_global_scale' is no part"


def _plain_faults() -> Iterator[tuple[str, Change, str]]:
    for name in ("weight", "weight_scale", "weight_zero_point"):
        yield f"missing {name}", _drop(name), f"{MODULE}.{name}' is missing"
        yield f"cut {name}", _cut(name), f"{MODULE}.weight"
    yield "codes as u8", _cast("weight", torch.uint8), "weight' is U8"
    yield "codes as f32", _cast("weight", torch.float32), "weight' is F32"
    yield "a stack", lambda p: p.update(weight=p["weight"][None]), "expected 2 extents"
    yield "zero points as i32", _cast("weight_zero_point", torch.int32), "weight_zero_point' is I32"
    yield "no groups", lambda p: p.update(weight=p["weight"][:, :60].clone()), "groups of 32"
    yield "shape too", _add(weight_shape=torch.tensor([16, 64])), "weight_shape' is no part"


@pytest.mark.parametrize(
    ("format", "change", "words"),
    [
        pytest.param(format, change, words, id=f"{format} {name}")
        for format, faults in (
            ("pack-quantized", _packed_faults()),
            ("int-quantized", _plain_faults()),
        )
        for name, change, words in faults
    ],
)
def test_every_part_is_checked_before_data_is_read(
    ct: SimpleNamespace, format: str, change: Change, words: str, tmp_path: Path
) -> None:
    scheme = ct.scheme(format, 4, symmetric=False, **SPANS["g32"])
    scheme.targets = [MODULE]
    parts, _ = ct.compressed(scheme, 16, 64, torch.bfloat16)
    change(parts)
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(ct.folder(tmp_path, parts, scheme))
    assert words in caught.value.what


@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
def test_a_zero_point_that_the_config_does_not_know_is_refused(
    ct: SimpleNamespace, format: str, tmp_path: Path
) -> None:
    scheme = ct.scheme(format, 8, **SPANS["row"])
    parts, _ = ct.compressed(scheme, 16, 64, torch.bfloat16)
    parts["weight_zero_point"] = torch.zeros((16, 1), dtype=torch.int8)
    with pytest.raises(ModelFileError, match="weight_zero_point' is a zero point, but"):
        open_checkpoint(ct.folder(tmp_path, parts, scheme))


def test_columns_in_order_are_read(ct: SimpleNamespace, tmp_path: Path) -> None:
    scheme = ct.scheme("pack-quantized", 4, **SPANS["g32"])
    parts, _ = ct.compressed(scheme, 16, 64, torch.bfloat16)
    for index in (
        torch.arange(64, dtype=torch.int32) // 32,
        torch.full((64,), -1, dtype=torch.int32),
    ):
        parts["weight_g_idx"] = index
        assert _read(ct.folder(tmp_path, parts, scheme))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_scattered_groups_are_opened(
    ct: SimpleNamespace, bits: int, symmetric: bool, tmp_path: Path
) -> None:
    scheme = ct.scheme("pack-quantized", bits, symmetric=symmetric, **SPANS["g32"])
    parts, _ = ct.compressed(scheme, 13, 96, torch.bfloat16)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0)) // 32
    parts["weight_g_idx"] = order.to(torch.int32)
    opened = open_checkpoint(ct.folder(tmp_path, parts, scheme))
    name = f"{MODULE}.weight"
    assert opened.tensors[name].opened
    label = f"compressed-tensors int{bits} with reordered columns, opened to F32"
    assert opened.quantization == label
    codes = unpack_from_int32(parts["weight_packed"], bits, torch.Size((13, 96))).float()
    if not symmetric:
        packed = parts["weight_zero_point"]
        zeros = unpack_from_int32(packed, bits, torch.Size((13, 3)), packed_dim=0)
        codes -= zeros.float()[:, order]
    form = opened.read(name)
    assert isinstance(form, Dense)
    expected = codes * parts["weight_scale"].float()[:, order]
    assert torch.equal(ct.weights(form).float(), expected)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_scale_too_large_for_scattered_groups_is_named(
    ct: SimpleNamespace, tmp_path: Path
) -> None:
    scheme = ct.scheme("pack-quantized", 4, **SPANS["g32"])
    parts, _ = ct.compressed(scheme, 16, 64, torch.bfloat16)
    parts["weight_g_idx"] = torch.arange(64, dtype=torch.int32) % 2
    parts["weight_scale"][1, 1] = 3e38
    opened = open_checkpoint(ct.folder(tmp_path, parts, scheme))
    with pytest.raises(ModelFileError, match=r"weight_scale' is not finite, or .* element 3"):
        opened.read(f"{MODULE}.weight")


def test_an_order_that_the_config_promises_must_be_there(
    ct: SimpleNamespace, tmp_path: Path
) -> None:
    scheme = ct.scheme("pack-quantized", 4, **SPANS["g32"])
    parts, _ = ct.compressed(scheme, 16, 64, torch.bfloat16)
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "actorder": "group", **SPANS["g32"]}}
    with pytest.raises(ModelFileError, match="weight_g_idx' is missing"):
        open_checkpoint(ct.folder(tmp_path, parts, scheme, config_groups={"g": group}))


@pytest.mark.parametrize(
    ("format", "index", "value", "words"),
    [
        ("pack-quantized", (1, 1), float("nan"), "weight_scale' is not finite at element 3"),
        ("int-quantized", (0, 1), float("inf"), "weight_scale' is not finite at element 1"),
        ("int-quantized", (0, 1), 3e38, "weight_scale' is not finite, or too large, at element 1"),
    ],
)
def test_a_scale_that_is_not_finite_is_named(
    ct: SimpleNamespace,
    format: str,
    index: tuple[int, int],
    value: float,
    words: str,
    tmp_path: Path,
) -> None:
    scheme = ct.scheme(format, 8, symmetric=False, **SPANS["g32"])
    parts: dict[str, Any]
    parts, _ = ct.compressed(scheme, 16, 64, torch.bfloat16)
    parts["weight_scale"][index] = value
    opened = open_checkpoint(ct.folder(tmp_path, parts, scheme))
    with pytest.raises(ModelFileError, match=words):
        opened.read(f"{MODULE}.weight")
