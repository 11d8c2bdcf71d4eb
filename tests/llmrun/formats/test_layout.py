"""The plan: alignment, order, shard sizes, and what it refuses."""

import json
from typing import Any

import pytest

from llmrun.errors import InternalError, UnavailableError
from llmrun.formats import limits
from llmrun.formats.layout import DATA_START, plan_layout, published_format
from llmrun.formats.planned import Planned
from llmrun.kernels.host import DType

LAYERS = [
    planned
    for layer in range(4)
    for planned in (
        Planned(f"layers.{layer}.up_proj.weight", "int4 g32", (64, 128)),
        Planned(f"layers.{layer}.norm.weight", "bf16", (36,)),
        Planned(f"layers.{layer}.bias", "F32", (3,)),
        Planned(f"layers.{layer}.down_proj.weight", "int8 row", (32, 64)),
    )
]


def test_headers_are_padded_and_large_parts_aligned() -> None:
    layout = plan_layout(LAYERS, DType.BF16, {"made by": "a test"})
    (shard,) = layout.shards
    assert shard.file == "model.safetensors"
    assert len(shard.header) % DATA_START == 0
    header = json.loads(shard.header[8:])
    assert header.pop("__metadata__") == {"format": "pt", "made by": "a test"}
    position, odd = 0, False
    widths = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2}
    for entry in header.values():
        begin, end = entry["data_offsets"]
        assert begin == position
        assert begin % widths[entry["dtype"]] == 0
        if (end - begin) % 64:
            odd = True
        else:
            assert not odd
            assert begin % 64 == 0
        position = end
    assert shard.nbytes == len(shard.header) + position == layout.nbytes
    large = [name for name, entry in header.items() if entry["dtype"] == "I32"]
    assert large == sorted(large, key=lambda name: int(name.split(".")[1]))


def test_shards_keep_the_order_and_the_limit() -> None:
    whole = plan_layout(LAYERS, DType.BF16, {})
    layout = plan_layout(LAYERS, DType.BF16, {}, shard_bytes=7_000)
    assert len(layout.shards) > 2
    count = len(layout.shards)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert [shard.file for shard in layout.shards] == names
    assert [name for shard in layout.shards for name in shard.parts] == [t.name for t in LAYERS]
    for shard in layout.shards:
        assert shard.nbytes - len(shard.header) <= 7_000
    places = layout.index["weight_map"]
    assert isinstance(places, dict)
    assert places.keys() == whole.index["weight_map"].keys()  # type: ignore[attr-defined]
    assert set(places.values()) == set(names)


def test_a_tensor_over_the_limit_gets_its_own_shard() -> None:
    layout = plan_layout(LAYERS[:2], DType.BF16, {}, shard_bytes=10)
    assert [list(shard.parts) for shard in layout.shards] == [[t.name] for t in LAYERS[:2]]


def test_parts_per_shard_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.formats.layout.SHARD_PARTS", 8)
    assert len(plan_layout(LAYERS, DType.BF16, {}).shards) == 4
    assert limits.SHARD_PARTS < limits.SAFETENSORS_TENSORS
    assert limits.SAFETENSORS_HEADER.brackets > 3 * limits.SHARD_PARTS


def _planned(name: str, kind: str, **more: Any) -> Planned:
    return Planned(f"model.layers.0.{name}.weight", kind, (64, 128), **more)


NORM = Planned("norm.weight", "bf16", (128,))


@pytest.mark.parametrize(
    ("format", "tensors"),
    [
        (None, [NORM]),
        ("compressed-tensors", [_planned("a", "int4 g32"), NORM, _planned("b", "int8 row")]),
        ("compressed-tensors", [_planned("a", "int4 g32 +zero"), _planned("b", "int4 g32")]),
        ("bitsandbytes", [_planned("a", "lut4 g64", table="nf4"), NORM]),
        ("bitsandbytes", [_planned("a", "lut4 g64", table="fp4", nested=True)]),
        (
            "llmrun",
            [_planned("a", "lut4 g64", table="nf4"), _planned("b", "lut4 g64", table="fp4")],
        ),
        ("llmrun", [_planned("a", "lut4 g64", table="nf4"), _planned("b", "int8 g128")]),
        ("llmrun", [_planned("mlp.experts.3.up_proj", "lut4 g64", table="nf4")]),
        ("compressed-tensors", [_planned("mlp.experts.3.up_proj", "int4 g32")]),
        ("llmrun", [_planned("mlp.experts.3.up_proj", "int4 g32 +zero")]),
        ("llmrun", [_planned("a", "lut4 g32")]),
        ("llmrun", [_planned("a", "int4 g32 +min")]),
        ("llmrun", [_planned("a", "int4 g16")]),
        ("llmrun", [_planned("a", "int4 g32", columns=True)]),
        ("llmrun", [_planned("a", "int4 g32", scale=DType.F32)]),
        ("llmrun", [Planned("a.weight", "int8 row", (8, 66))]),
    ],
)
def test_the_kinds_decide_the_format(format: str | None, tensors: list[Planned]) -> None:
    writing = published_format(tensors)
    assert (writing and writing.name) == format
    assert plan_layout(tensors, DType.BF16, {}).writing is writing
    if writing is not None:
        assert ("vLLM" in writing.readers) == (format == "compressed-tensors")
        assert "llmrun" in writing.readers


@pytest.mark.parametrize(
    "planned",
    [
        Planned("a.weight", "int4 g48", (8, 96)),
        Planned("a.weight", "lut4 g64 +min", (8, 64)),
        Planned("a.weight", "lut8 g64", (8, 64)),
        Planned("a.weight", "fp8", (8, 64)),
        Planned("a.weight", "int4 g32", (2, 8, 64)),
        Planned("a.bias", "int4 g32", (8, 64)),
    ],
)
def test_what_no_format_holds_is_refused(planned: Planned) -> None:
    with pytest.raises(UnavailableError, match="Keep this tensor") as caught:
        plan_layout([NORM, planned], DType.BF16, {})
    assert caught.value.exit_code == 9


def test_a_name_is_planned_once() -> None:
    with pytest.raises(InternalError, match="twice"):
        plan_layout([LAYERS[0], LAYERS[0]], DType.BF16, {})
