"""Pack-quantized folders made by the library, read as the library itself decompresses them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

from llmrun.errors import ModelFileError
from llmrun.formats.open import open_checkpoint
from llmrun.kernels.forms import Dense, GroupInt

MODULE = "model.layers.0.mlp.up_proj"
TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def _scheme(bits: int, group: int, symmetric: bool) -> QuantizationScheme:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    return QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")


def _compressed(
    scheme: QuantizationScheme, n: int, k: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the stored parts of a random weight and the library's decompression of them."""
    args = scheme.weights
    assert args is not None
    generator = torch.Generator().manual_seed(n + k)
    groups = k // (args.group_size or k)
    half = 2 ** (args.num_bits - 1)
    state = {
        "weight": torch.randn((n, k), generator=generator).to(dtype),
        "weight_scale": (torch.rand((n, groups), generator=generator) * 2 / half + 0.01).to(dtype),
    }
    if not args.symmetric:
        zeros = torch.randint(-half, half, (n, groups), generator=generator)
        state["weight_zero_point"] = zeros.to(torch.int8)
    parts = PackedQuantizationCompressor.compress(state, scheme)
    return parts, PackedQuantizationCompressor.decompress(parts, scheme)["weight"]


def _folder(
    path: Path, parts: dict[str, torch.Tensor], scheme: QuantizationScheme, **config: object
) -> Path:
    group = json.loads(scheme.model_dump_json())
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **config,
    }
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    stored = {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in parts.items()}
    stored["lm_head.weight"] = torch.ones(2, 3)
    save_file(stored, path / "model.safetensors")
    return path


def _weights(form: GroupInt) -> torch.Tensor:
    """Return the weights by the storage form's formula, in float64."""

    def tensor(name: str) -> torch.Tensor:
        array = form.arrays[name]
        return torch.frombuffer(array.data, dtype=TYPES[array.dtype.name]).double().view(-1, 1)

    codes = torch.frombuffer(form.codes.data, dtype=torch.uint8)
    if form.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1)
    u = codes.reshape(-1, form.group or form.shape[1]).double()
    if form.mins is None:
        return (tensor("scales") * (u - 2 ** (form.bits - 1))).view(form.shape)
    return (tensor("scales") * u + tensor("mins")).view(form.shape)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_to_the_library(
    bits: int, group: int, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    scheme = _scheme(bits, group, symmetric)
    parts, expected = _compressed(scheme, 13, 256, dtype)
    opened = open_checkpoint(_folder(tmp_path, parts, scheme))
    name = f"{MODULE}.weight"
    assert set(opened.tensors) == {name, "lm_head.weight"}
    form = opened.read(name)
    assert isinstance(form, GroupInt)
    assert opened.tensors[name].kind == form.kind
    assert opened.tensors[name].shape == form.shape == (13, 256)
    assert form.kind in str(opened.quantization)
    assert bytes(form.codes.data) == parts["weight_packed"].numpy().tobytes()
    assert torch.equal(_weights(form).to(dtype), expected)
    assert isinstance(opened.read("lm_head.weight"), Dense)


def test_symmetric_codes_and_scales_are_views_of_the_file(tmp_path: Path) -> None:
    scheme = _scheme(4, 32, True)
    opened = open_checkpoint(
        _folder(tmp_path, _compressed(scheme, 4, 64, torch.float16)[0], scheme)
    )
    one, two = (opened.read(f"{MODULE}.weight") for _ in range(2))
    one.arrays["codes"].data[0] ^= 255
    one.arrays["scales"].data[0] ^= 1
    assert bytes(two.arrays["codes"].data) == bytes(one.arrays["codes"].data)
    assert bytes(two.arrays["scales"].data) == bytes(one.arrays["scales"].data)


Parts = dict[str, torch.Tensor]


def _faults() -> Iterator[tuple[str, Callable[[Parts], object], str]]:
    def cast(name: str, dtype: torch.dtype) -> Callable[[Parts], object]:
        return lambda parts: parts.update({name: parts[name].to(dtype)})

    def cut(name: str) -> Callable[[Parts], object]:
        return lambda parts: parts.update({name: parts[name][:-1]})

    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    for name in names:
        yield (
            f"missing {name}",
            lambda parts, name=name: parts.pop(name),
            f"{MODULE}.{name}' is missing",
        )
        yield f"cut {name}", cut(name), f"{MODULE}.{name}' is"
    yield "scale as f64", cast("weight_scale", torch.float64), "weight_scale' is F64"
    yield "codes as i64", cast("weight_packed", torch.int64), "weight_packed' is I64"
    yield "zero points as i16", cast("weight_zero_point", torch.int16), "weight_zero_point' is I16"
    yield "shape as f32", cast("weight_shape", torch.float32), "weight_shape' is F32"
    for shape in ([16, 63], [0, 64], [-16, 64], [2**62, 64], [16, 32]):
        change = {"weight_shape": torch.tensor(shape)}
        yield f"shape {shape}", lambda parts, change=change: parts.update(change), MODULE
    act_order = {"weight_g_idx": torch.arange(63, -1, -1, dtype=torch.int32) // 32}
    yield "reordered", lambda parts: parts.update(act_order), "weight_g_idx' reorders"
    both = {"weight": torch.zeros(16, 64)}
    yield "plain too", lambda parts: parts.update(both), "both packed and plain"
    yield (
        "only plain",
        lambda parts: (parts.clear(), parts.update(both)),
        "weight_packed' is missing",
    )


@pytest.mark.parametrize("fault", [pytest.param((f, w), id=n) for n, f, w in _faults()])
def test_every_part_is_checked_before_data_is_read(
    fault: tuple[Callable[[Parts], object], str], tmp_path: Path
) -> None:
    change, words = fault
    scheme = _scheme(4, 32, False)
    scheme.targets = [MODULE]
    parts, _ = _compressed(scheme, 16, 64, torch.bfloat16)
    change(parts)
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, parts, scheme))
    assert words in caught.value.what


def test_columns_in_order_are_read(tmp_path: Path) -> None:
    scheme = _scheme(4, 32, True)
    parts, _ = _compressed(scheme, 16, 64, torch.bfloat16)
    for index in (
        torch.arange(64, dtype=torch.int32) // 32,
        torch.full((64,), -1, dtype=torch.int32),
    ):
        parts["weight_g_idx"] = index
        assert open_checkpoint(_folder(tmp_path, parts, scheme)).read(f"{MODULE}.weight")


def test_each_packed_module_needs_exactly_one_group(tmp_path: Path) -> None:
    scheme = _scheme(4, 32, True)
    parts, _ = _compressed(scheme, 16, 64, torch.bfloat16)
    group = json.loads(scheme.model_dump_json())
    two = {"a": group, "b": {**group, "targets": ["re:.*up_proj$"]}}
    with pytest.raises(ModelFileError, match="2 groups of the config"):
        open_checkpoint(_folder(tmp_path, parts, scheme, config_groups=two))
    with pytest.raises(ModelFileError, match="no group of the config"):
        open_checkpoint(_folder(tmp_path, parts, scheme, ignore=["re:.*up_proj$"]))


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    scheme = _scheme(4, 32, True)
    parts, _ = _compressed(scheme, 16, 64, torch.bfloat16)
    parts["weight_scale"][1, 1] = float("nan")
    opened = open_checkpoint(_folder(tmp_path, parts, scheme))
    with pytest.raises(ModelFileError, match="weight_scale' is not finite at element 3"):
        opened.read(f"{MODULE}.weight")
