"""llmrun's own folders: every form comes back bit for bit, and damage is refused by name."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmrun.errors import InternalError, ModelFileError
from llmrun.formats.layout import plan_layout
from llmrun.formats.open import open_checkpoint
from llmrun.formats.planned import Planned
from llmrun.formats.write import Content, write_folder
from llmrun.kernels.forms import ROW, Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray

N, K = 6, 256


def _random(dtype: DType, *shape: int, seed: int = 0) -> HostArray:
    """Random bytes; of floats, small finite numbers of both signs."""
    made = HostArray(dtype, shape, memoryview(bytearray(_size(dtype, shape))))
    raw = bytearray(random.Random(seed).randbytes(made.nbytes))
    width = dtype.bits // 8
    if dtype in (DType.F16, DType.BF16, DType.F32):
        raw[width - 1 :: width] = bytes(byte & 0xBF for byte in raw[width - 1 :: width])
    made.data[:] = raw
    return made


def _size(dtype: DType, shape: tuple[int, ...]) -> int:
    size = dtype.bits // 8
    for extent in shape:
        size *= extent
    return size


def _integers(
    bits: int, group: int, scale: DType, mins: DType | None = None, columns: bool = False
) -> GroupInt:
    groups = K // (group or K)
    order = None
    if columns:
        numbers = random.Random(1).sample(range(K), K)
        data = b"".join(number.to_bytes(4, "little") for number in numbers)
        order = HostArray(DType.I32, (K,), memoryview(bytearray(data)))
    return GroupInt(
        bits,
        group,
        _random(DType.U8, N, K * bits // 8),
        _random(scale, N, groups),
        None if mins is None else _random(mins, N, groups, seed=1),
        (N, K),
        columns=order,
    )


def _table(group: int, scale: DType) -> Lut16:
    return Lut16(
        group,
        _random(DType.U8, N, K // 2),
        _random(DType.F32, 16, seed=2),
        _random(scale, N, K // group),
        (N, K),
    )


FORMS: dict[str, Form] = {
    "table g32 f16": _table(32, DType.F16),
    "table g64 f32": _table(64, DType.F32),
    "table g128 bf16": _table(128, DType.BF16),
    "int4 g16": _integers(4, 16, DType.BF16),
    "int4 g32 f32": _integers(4, 32, DType.F32),
    "int8 row": _integers(8, ROW, DType.BF16),
    "int8 g128 min": _integers(8, 128, DType.F16, DType.F16),
    "int4 row min f32": _integers(4, ROW, DType.F32, DType.F32),
    "int4 g64 zero": _integers(4, 64, DType.F16, DType.U8),
    "int8 g32 zero": _integers(8, 32, DType.BF16, DType.U8),
    "int4 g128 columns": _integers(4, 128, DType.F16, columns=True),
    "dense": Dense(_random(DType.BF16, N, K)),
    "norm": Dense(_random(DType.F32, 3)),
}
NAMES = {case: f"model.layers.{number}.up_proj.weight" for number, case in enumerate(FORMS)}


def _planned(name: str, form: Form) -> Planned:
    if isinstance(form, Dense):
        return Planned(name, form.kind, form.shape)
    columns = isinstance(form, GroupInt) and form.columns is not None
    return Planned(name, form.kind, form.shape, scale=form.scales.dtype, columns=columns)


def _write(out: Path, forms: dict[str, Form]) -> dict[str, object]:
    out.mkdir(exist_ok=True)
    items = [(NAMES[case], form, {}) for case, form in forms.items()]
    layout = plan_layout([_planned(name, form) for name, form, _ in items], DType.BF16, {})
    content = Content(layout, {"model_type": "llama", "dtype": "bfloat16"}, {}, {})
    write_folder(out, lambda start: items[start:], content)
    config: dict[str, object] = json.loads((out / "config.json").read_text())
    return config


def test_every_form_comes_back_bit_for_bit(tmp_path: Path) -> None:
    config = _write(tmp_path / "out", FORMS)
    quantization: Any = config["quantization_config"]
    assert (quantization["quant_method"], quantization["version"]) == ("llmrun", 1)
    opened = open_checkpoint(tmp_path / "out")
    assert opened.quantization is not None
    for case, form in FORMS.items():
        found = opened.read(NAMES[case])
        info = opened.tensors[NAMES[case]]
        assert (found.kind, found.shape) == (form.kind, form.shape)
        assert (info.kind.lower(), info.shape) == (form.kind, form.shape)
        assert found.arrays.keys() == form.arrays.keys()
        for part, array in form.arrays.items():
            assert found.arrays[part].dtype is array.dtype
            assert bytes(found.arrays[part].data) == bytes(array.data), (case, part)


def _edit(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda quantization: quantization.update({key: value})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_edit("version", 2), "version is 2"),
        (_edit("surprise", 1), "surprise"),
        (_edit("weights", None), "weights is None"),
        (_edit("weights", {"lut4 g16": []}), "a kind of weights is 'lut4 g16'"),
        (_edit("weights", {"int4 g32": "all"}), "weights of kind int4 g32"),
        (_edit("weights", {"int4 g32": [], "lut4 g32": []}), "part of a quantized weight"),
        (
            _edit("weights", {"int4 g32": [NAMES["table g32 f16"]]}),
            "no part of a weight stored as int4 g32",
        ),
        (_edit("weights", {"lut4 g64": [NAMES["table g32 f16"]]}), "_scale' is F16"),
        (_edit("weights", {"lut4 g32": ["x.weight"]}), "x.weight_codes' is missing"),
        (
            _edit(
                "weights",
                {"lut4 g32": [NAMES["table g32 f16"]], "int4 g32": [NAMES["table g32 f16"]]},
            ),
            "listed twice",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    edit: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    config: Any = _write(tmp_path / "out", {"table g32 f16": FORMS["table g32 f16"]})
    edit(config["quantization_config"])
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(tmp_path / "out")
    assert words in caught.value.what


def test_scales_and_tables_must_be_finite_and_columns_an_order(tmp_path: Path) -> None:
    forms = {case: FORMS[case] for case in ("table g64 f32", "int4 g128 columns")}
    _write(tmp_path / "out", forms)
    path = tmp_path / "out" / "model.safetensors"
    for case, part, bad in (
        ("table g64 f32", "scale", b"\0\0\xc0\x7f"),
        ("table g64 f32", "table", b"\0\0\x80\x7f"),
        ("int4 g128 columns", "columns", b"\0\0\0\x80"),
    ):
        whole = path.read_bytes()
        array = forms[case].arrays[{"scale": "scales"}.get(part, part)]
        at = whole.index(bytes(array.data))
        path.write_bytes(whole[:at] + bad + whole[at + 4 :])
        damaged = open_checkpoint(tmp_path / "out")
        with pytest.raises(ModelFileError, match=f"{part}' "):
            damaged.read(NAMES[case])
        path.write_bytes(whole)


def test_a_form_other_than_planned_is_our_fault(tmp_path: Path) -> None:
    form = _table(32, DType.F16)
    for planned, words in (
        (Planned("a.weight", "lut4 g32", (N, K)), "planned as BF16"),
        (Planned("a.weight", "lut4 g32", (N, K), scale=DType.F32), "planned as F32"),
    ):
        content = Content(plan_layout([planned], DType.BF16, {}), {}, {}, {})
        out = tmp_path / words[-3:]
        out.mkdir()
        with pytest.raises(InternalError, match=words):
            write_folder(out, lambda start: [("a.weight", form, {})], content)
