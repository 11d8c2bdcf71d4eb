"""bitsandbytes folders made by the library itself, read as it dequantizes them."""

import json
from collections.abc import Callable
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors.torch import save_file

from llmrun.errors import ModelFileError
from llmrun.formats.open import open_checkpoint
from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16
from llmrun.quant.dequantize import dequantize

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
EIGHT = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
Tensors = dict[str, torch.Tensor]


def _random(n: int, k: int) -> torch.Tensor:
    return torch.randn((n, k), generator=torch.Generator().manual_seed(n * k))


def _four_bit(
    weight: torch.Tensor,
    kind: str = "nf4",
    block: int = 64,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
) -> tuple[Tensors, torch.Tensor]:
    """The stored tensors of a weight, and what the library makes of them in fp32."""
    packed, state = bnb.quantize_4bit(weight, None, None, block, nested, kind, storage)
    parts = {f"{NAME}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    stored = {NAME: packed, **parts, "lm_head.weight": torch.ones(2, 3)}
    return stored, _dequantized(packed.view(torch.uint8), state).view(weight.shape)


def _dequantized(packed: torch.Tensor, state: bnb.QuantState) -> torch.Tensor:
    """The library's dequantization, flat."""
    count = state.shape.numel()
    if count % 2 == 0:
        # As one row: the library's kernels for this processor take no block that straddles rows,
        # though its quantizer and its other devices make them.
        state.shape = torch.Size((1, count))
        return bnb.dequantize_4bit(packed, state)
    # Of odd counts it makes a compiled function, which takes a minute; its formula.
    absmax = state.absmax
    if state.nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[:count].int()
    return state.code[codes] * absmax.repeat_interleave(state.blocksize)[:count]


def _folder(path: Path, tensors: Tensors, config: dict[str, object]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    return path


def _values(form: Form) -> torch.Tensor:
    return torch.frombuffer(dequantize(form).data, dtype=torch.float32).view(form.shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("block", "k", "group"),
    [(64, 128, 64), (64, 96, 32), (128, 256, 128), (32, 64, 32), (256, 384, 128), (512, 64, 64)],
)
def test_four_bits_equal_the_library(
    block: int, k: int, group: int, kind: str, nested: bool, tmp_path: Path
) -> None:
    stored, expected = _four_bit(_random(26, k), kind, block, nested)
    opened = open_checkpoint(_folder(tmp_path, stored, {**FOUR, "bnb_4bit_quant_type": kind}))
    assert set(opened.tensors) == {NAME, "lm_head.weight"}
    form = opened.read(NAME)
    assert isinstance(form, Lut16)
    assert form.group == group
    assert opened.tensors[NAME].kind == form.kind
    assert opened.tensors[NAME].shape == form.shape == (26, k)
    assert torch.equal(_values(form), expected)
    assert opened.quantization == f"bitsandbytes 4-bit lut4 g{group}"
    assert isinstance(opened.read("lm_head.weight"), Dense)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n", "k"), [(10, 80), (7, 33), (33, 4097)])
def test_blocks_that_straddle_rows_are_opened(n: int, k: int, nested: bool, tmp_path: Path) -> None:
    stored, expected = _four_bit(_random(n, k), nested=nested)
    opened = open_checkpoint(_folder(tmp_path, stored, FOUR))
    assert opened.tensors[NAME].opened
    assert opened.tensors[NAME].kind == "nf4 blocks that straddle rows, opened to F32"
    assert opened.quantization == f"bitsandbytes 4-bit {opened.tensors[NAME].kind}"
    form = opened.read(NAME)
    assert isinstance(form, Dense)
    assert torch.equal(_values(form), expected)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_codes_may_be_stored_as_any_dtype(storage: torch.dtype, tmp_path: Path) -> None:
    stored, expected = _four_bit(_random(16, 64), storage=storage)
    named = {**FOUR, "bnb_4bit_quant_storage": str(storage).removeprefix("torch.")}
    form = open_checkpoint(_folder(tmp_path, stored, named)).read(NAME)
    assert torch.equal(_values(form), expected)
    with pytest.raises(ModelFileError, match="expected U8"):
        open_checkpoint(_folder(tmp_path, stored, {**FOUR, "bnb_4bit_quant_storage": "uint8"}))


def test_a_block_of_zeros_stays_zero(tmp_path: Path) -> None:
    weight = _random(4, 128)
    weight[1] = 0
    stored, expected = _four_bit(weight)
    form = open_checkpoint(_folder(tmp_path, stored, FOUR)).read(NAME)
    assert torch.equal(_values(form), expected)
    assert not _values(form)[1].any()


@pytest.mark.parametrize("k", [64, 33])
def test_eight_bits(k: int, tmp_path: Path) -> None:
    weight = _random(5, k)
    weight[2] = -weight[2].abs()
    codes, scale, _ = bnb.int8_vectorwise_quant(weight.half())
    stored = {
        NAME: codes,
        f"{MODULE}.SCB": scale,
        f"{MODULE}.weight_format": torch.tensor(0, dtype=torch.uint8),
        f"{MODULE}.bias": torch.ones(5),
    }
    opened = open_checkpoint(_folder(tmp_path, stored, {**EIGHT, "llm_int8_threshold": 6.0}))
    assert set(opened.tensors) == {NAME, f"{MODULE}.bias"}
    form = opened.read(NAME)
    assert isinstance(form, GroupInt)
    assert opened.tensors[NAME].kind == form.kind == "int8 row"
    assert torch.equal(_values(form), codes.float() * (scale / 127).unsqueeze(1))
    # The library multiplies by a rounded 1 / 127 in another order: two roundings of fp32.
    library = bnb.int8_vectorwise_dequant(codes, scale)
    assert torch.allclose(_values(form), library, rtol=3e-7, atol=0)
    del stored[f"{MODULE}.weight_format"]
    again = open_checkpoint(_folder(tmp_path / "old", stored, EIGHT)).read(NAME)
    assert torch.equal(_values(again), _values(form))


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def _state(**changes: object) -> Callable[[Tensors], object]:
    name = f"{NAME}.quant_state.bitsandbytes__nf4"

    def change(tensors: Tensors) -> None:
        state = json.loads(bytes(tensors[name].tolist())) | changes
        kept = {key: value for key, value in state.items() if value is not None}
        tensors[name] = torch.tensor(list(json.dumps(kept).encode()), dtype=torch.uint8)

    return change


ABSMAX, MAP = f"{NAME}.absmax", f"{NAME}.quant_map"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
NESTED_FAULTS = {
    "no state": (_without(STATE), "quant_state.bitsandbytes__...' is missing"),
    "no absmax": (_without(ABSMAX), "weight.absmax' is missing"),
    "no map": (_without(MAP), "weight.quant_map' is missing"),
    "no outer": (_without(f"{NAME}.nested_absmax"), "weight.nested_absmax' is missing"),
    "no nested map": (_without(f"{NAME}.nested_quant_map"), "nested_quant_map' is missing"),
    "no codes": (_without(NAME), f"{NAME}' is missing"),
    "absmax cut": (_with(ABSMAX, lambda t: t[:-1]), "absmax' is U8 (47,), expected U8 (48,)"),
    "absmax f32": (_with(ABSMAX, lambda t: t.float()), "absmax' is F32"),
    "map f16": (_with(MAP, lambda t: t.half()), "quant_map' is F16"),
    "map cut": (_with(MAP, lambda t: t[:8]), "quant_map' is F32 (8,)"),
    "codes cut": (_with(NAME, lambda t: t[:-1]), "weight' has 1,535 bytes"),
    "codes flat": (_with(NAME, lambda t: t.view(-1)), "expected U8 or I8"),
    "codes i64": (_with(NAME, lambda t: t.view(-1).view(torch.int64).view(-1, 1)), "is I64"),
    "state f32": (_with(STATE, lambda t: t.float()), "expected U8 of JSON text"),
    "state no json": (_with(STATE, lambda t: t[:-1]), "is not valid JSON"),
    "other type": (_state(quant_type="fp4"), "says quant_type 'fp4'"),
    "block 0": (_state(blocksize=0), "says blocksize 0"),
    "block text": (_state(blocksize="64"), "says blocksize '64'"),
    "three extents": (_state(shape=[2, 16, 96]), "says shape [2, 16, 96]"),
    "negative": (_state(shape=[-32, -96]), "says shape"),
    "larger": (_state(shape=[1 << 30, 1 << 30]), "weight' has"),
    "absurd": (_state(shape=[10**1900, 10**1900]), "says shape"),
    "half nested": (_state(nested_offset=None), "has the keys"),
    "other key": (_state(rotation=1), "has the keys"),
    "nested f16": (_state(nested_dtype="float16"), "nested_dtype"),
    "offset text": (_state(nested_offset="x"), "says nested_offset"),
    "stray nested": (
        _state(nested_offset=None, nested_blocksize=None, nested_dtype=None),
        "absmax' is U8 (48,), expected F32",
    ),
}


@pytest.mark.parametrize("fault", NESTED_FAULTS.values(), ids=NESTED_FAULTS.keys())
def test_every_part_is_checked_before_data_is_read(
    fault: tuple[Callable[[Tensors], object], str], tmp_path: Path
) -> None:
    change, words = fault
    stored, _ = _four_bit(_random(32, 96), nested=True)
    change(stored)
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, stored, FOUR))
    assert words in caught.value.what


def test_codes_without_any_part_are_named(tmp_path: Path) -> None:
    stored, _ = _four_bit(_random(32, 96))
    with pytest.raises(ModelFileError, match=r"quant_state.bitsandbytes__...' is missing"):
        open_checkpoint(_folder(tmp_path, {NAME: stored[NAME]}, FOUR))
    codes = {NAME: torch.ones((4, 8), dtype=torch.int8)}
    with pytest.raises(ModelFileError, match=r"up_proj.SCB' is missing"):
        open_checkpoint(_folder(tmp_path, codes, EIGHT))


def test_a_nested_map_on_a_plain_state_is_refused(tmp_path: Path) -> None:
    stored, _ = _four_bit(_random(32, 96))
    stored[f"{NAME}.nested_absmax"] = torch.ones(1)
    with pytest.raises(ModelFileError, match="quant_state is not nested"):
        open_checkpoint(_folder(tmp_path, stored, FOUR))


def test_another_table_and_a_scale_that_is_not_finite_are_refused(tmp_path: Path) -> None:
    stored, _ = _four_bit(_random(32, 96))
    stored[MAP][3] += 1e-5
    with pytest.raises(ModelFileError, match="quant_map' is not the table of nf4"):
        open_checkpoint(_folder(tmp_path, stored, FOUR)).read(NAME)
    stored, _ = _four_bit(_random(32, 96))
    stored[ABSMAX][5] = float("inf")
    with pytest.raises(ModelFileError, match="absmax' is not finite at element"):
        open_checkpoint(_folder(tmp_path, stored, FOUR)).read(NAME)


EIGHT_FAULTS = {
    "no SCB": (_without(f"{MODULE}.SCB"), "up_proj.SCB' is missing"),
    "no codes": (_without(NAME), f"{NAME}' is missing"),
    "SCB f16": (_with(f"{MODULE}.SCB", lambda t: t.half()), "SCB' is F16"),
    "SCB long": (_with(f"{MODULE}.SCB", lambda t: t.repeat(2)), "SCB' is F32 (8,)"),
    "codes u8": (_with(NAME, lambda t: t.view(torch.uint8)), "weight' is U8"),
    "turing": (_with(f"{MODULE}.weight_format", lambda t: t + 2), "weight_format' is 2"),
    "format i32": (_with(f"{MODULE}.weight_format", lambda t: t.int()), "weight_format' is I32"),
}


@pytest.mark.parametrize("fault", EIGHT_FAULTS.values(), ids=EIGHT_FAULTS.keys())
def test_eight_bit_parts_are_checked(
    fault: tuple[Callable[[Tensors], object], str], tmp_path: Path
) -> None:
    change, words = fault
    stored = {
        NAME: torch.ones((4, 8), dtype=torch.int8),
        f"{MODULE}.SCB": torch.ones(4),
        f"{MODULE}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    change(stored)
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, stored, EIGHT))
    assert words in caught.value.what


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"load_in_8bit": True}, "load_in_4bit"),
        ({"load_in_4bit": False}, "load_in_4bit"),
        ({"load_in_4bit": "yes"}, "load_in_4bit is 'yes'"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4'"),
        ({"bnb_4bit_quant_storage": "int4"}, "bnb_4bit_quant_storage is 'int4'"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules"),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight' is True"),
        ({"bnb_4bit_rotation": "hadamard"}, "'bnb_4bit_rotation' is 'hadamard'"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "is not 8-bit, unlike the config"),
    ],
)
def test_configs_that_mean_something_else_are_refused(
    config: dict[str, object], words: str, tmp_path: Path
) -> None:
    stored, _ = _four_bit(_random(32, 96))
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, stored, {**FOUR, **config}))
    assert words in caught.value.what


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    stored, expected = _four_bit(_random(32, 96))
    config = {
        **FOUR,
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
        "some_new_switch": None,
    }
    form = open_checkpoint(_folder(tmp_path, stored, config)).read(NAME)
    assert torch.equal(_values(form), expected)


def test_a_folder_without_packed_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no tensor is stored like that"):
        open_checkpoint(_folder(tmp_path, {"lm_head.weight": torch.ones(2, 3)}, FOUR))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    stored, _ = _four_bit(_random(32, 96))
    file = _folder(tmp_path, stored, FOUR) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="shorter than its header says"):
        open_checkpoint(tmp_path)
