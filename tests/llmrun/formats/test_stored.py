"""Checks of stored parts name the part, its file and what was expected."""

from pathlib import Path

import pytest

from llmrun.errors import ModelFileError
from llmrun.formats.safetensors_header import StoredTensor
from llmrun.formats.stored import expect, extents, need, only

PATH = Path("model.safetensors")
SCALE = StoredTensor("m.scale", "F32", (2,), memoryview(bytes(8)), 0, 8, PATH)


def test_shape_and_dtype_are_checked() -> None:
    expect(SCALE, (2,), ("F16", "F32"))
    with pytest.raises(ModelFileError) as caught:
        expect(SCALE, (2, 1), ("F16", "F32"))
    assert "'m.scale' is F32 (2,), expected F16 or F32 (2, 1)" in caught.value.what
    with pytest.raises(ModelFileError, match="expected F16"):
        expect(SCALE, (2,), ("F16",))


def test_parts_are_needed_and_no_others_allowed() -> None:
    parts = {"scale": SCALE}
    assert need(parts, "scale", "m", PATH.parent) is SCALE
    with pytest.raises(ModelFileError, match=r"tensor 'm\.codes' is missing"):
        need(parts, "codes", "m", PATH.parent)
    only(parts, ("scale", "codes"), "codes")
    with pytest.raises(ModelFileError, match=r"'m\.scale' is no part of a weight stored as codes"):
        only(parts, ("codes",), "codes")


def test_extents_are_counted_and_none_is_zero() -> None:
    extents(SCALE, 1)
    with pytest.raises(ModelFileError, match=r"is F32 \(2,\), expected 2 extents of 1 or more"):
        extents(SCALE, 2)
    empty = StoredTensor("m.codes", "U8", (0, 4), memoryview(b""), 0, 0, PATH)
    with pytest.raises(ModelFileError, match=r"is U8 \(0, 4\), expected 2 extents of 1 or more"):
        extents(empty, 2)
