"""Split models as the format's own writer makes them, and every way their parts can disagree."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from llmrun.errors import ModelFileError
from llmrun.formats import limits
from llmrun.formats.gguf import FORMAT
from llmrun.formats.gguf_split import PART_NAME

U16, I32, U32, STR = 2, 5, 4, 8
KINDS = {"F32": "norm.weight", "F16": "half.weight", "Q4_0": "a.weight", "Q8_0": "b.weight"}


def write(folder: Path, *, small_first: bool) -> list[Path]:
    """A model of four tensors in parts of two; with ``small_first`` the first part has none."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(
        folder / "tiny.gguf", "llama", split_max_tensors=2, small_first_shard=small_first
    )
    writer.add_context_length(128)
    writer.add_token_list(["a", "b"])
    for kind, name in KINDS.items():
        type_ = gguf.GGMLQuantizationType[kind]
        weight = rng.standard_normal((3, 64), np.float32)
        writer.add_tensor(name, gguf.quants.quantize(weight, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("small_first", [False, True])
def test_any_part_opens_the_whole_model(tmp_path: Path, small_first: bool) -> None:
    parts = write(tmp_path, small_first=small_first)
    assert len(parts) == 2 + small_first
    assert all(PART_NAME.fullmatch(part.name) for part in parts)
    stored = {t.name: t for part in parts for t in gguf.GGUFReader(part).tensors}
    for part in parts:
        opened = FORMAT.open(part)
        assert opened.path == part
        assert opened.config["llama.context_length"] == 128
        assert opened.config["tokenizer.ggml.tokens"] == ["a", "b"]
        assert opened.quantization == "GGUF Q4_0, Q8_0"
        assert list(opened.tensors) == list(KINDS.values())
        for name, tensor in stored.items():
            form = opened.read(name)
            assert form.shape == (3, 64)
            if tensor.tensor_type.name in ("F32", "F16"):
                assert bytes(form.arrays["w"].data) == tensor.data.tobytes()
            else:
                scales = tensor.data.reshape(6, -1)[:, :2]
                assert bytes(form.arrays["scales"].data) == scales.tobytes()


MakePart = Callable[..., bytes]


@pytest.fixture
def part(gg: SimpleNamespace) -> MakePart:
    """A part with one tensor; keys that are None are left out."""

    def make(
        number: object = 0, count: object = 2, total: object = 2, tensor: str | None = None
    ) -> bytes:
        keys = {"split.no": (U16, number), "split.count": (U16, count)}
        keys["split.tensors.count"] = (I32, total)
        name = tensor or f"t{number}"
        return gg.file(
            [gg.key(key, *value) for key, value in keys.items() if value[1] is not None],
            [gg.tensor(name, [4], 0, 0)],
            bytes(16),
        )

    return make


Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path) -> Refusal:
    """Write parts 1 and 2 of 2, open one of them: the error's words."""

    def check(*contents: bytes, opened: int = 1) -> str:
        for number, content in enumerate(contents, 1):
            (tmp_path / f"m-{number:05}-of-00002.gguf").write_bytes(content)
        with pytest.raises(ModelFileError) as caught:
            FORMAT.open(tmp_path / f"m-{opened:05}-of-00002.gguf")
        assert caught.value.exit_code == 5
        assert caught.value.next_step
        return caught.value.what

    return check


def test_good_parts_open(part: MakePart, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"m-{number + 1:05}-of-00002.gguf").write_bytes(part(number))
    assert list(FORMAT.open(tmp_path / "m-00002-of-00002.gguf").tensors) == ["t0", "t1"]


def test_parts_that_disagree(part: MakePart, refusal: Refusal, gg: SimpleNamespace) -> None:
    good = part(0)
    first, second = "'m-00001-of-00002.gguf': ", "'m-00002-of-00002.gguf': "
    assert refusal(good, part(0, tensor="x")) == (
        f"{second}split.no is 0, but 1 according to its name."
    )
    assert refusal(part(1), part(0)) == f"{first}split.no is 1, but 0 according to its name."
    assert refusal(good, part(1, count=3)) == (
        f"{second}split.count is 3, but 2 according to 'm-00001-of-00002.gguf'."
    )
    assert refusal(good, part(1, total=3)) == (
        f"{second}split.tensors.count is 3, but 2 according to 'm-00001-of-00002.gguf'."
    )
    assert refusal(part(0, total=3), part(1, total=3)) == (
        f"{first}split.tensors.count is 3, but the parts hold 2."
    )
    assert refusal(good, part(1, tensor="t0")) == (
        f"{second}tensor 't0' is in 'm-00001-of-00002.gguf' already."
    )
    assert "split.count is missing" in refusal(good, part(1, count=None))
    assert "split.no is missing" in refusal(good, part(None))
    assert f"{second}split.no is missing" in refusal(part(0), part(None), opened=2)
    assert "split.tensors.count is missing" in refusal(part(0, total=None), part(1))
    assert "split.tensors.count is -1, no count" in refusal(part(0, total=-1), part(1))
    assert "split.count is 3, but its name says 2" in refusal(part(0, count=3), part(1))


def test_a_count_that_is_none(refusal: Refusal, gg: SimpleNamespace) -> None:
    text = gg.file([gg.key("split.count", STR, "2")], [gg.tensor("t", [4], 0, 0)], bytes(16))
    assert "split.count is '2', no count" in refusal(text)


def test_missing_parts_are_named_before_anything_is_read(part: MakePart, tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00005.gguf"
    path.write_bytes(part(1, count=5, total=5))
    with pytest.raises(ModelFileError) as caught:
        FORMAT.open(path)
    assert caught.value.what == (
        "'m-00002-of-00005.gguf': of its 5 parts 'm-00001-of-00005.gguf', "
        "'m-00003-of-00005.gguf', 'm-00004-of-00005.gguf' and 1 more are missing."
    )
    assert "one folder" in caught.value.next_step


@pytest.mark.parametrize("name", ["model.gguf", "m-1-of-2.gguf", "m-00001-of-00002.gguf.gguf"])
def test_a_part_without_its_name(name: str, part: MakePart, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(part(0))
    with pytest.raises(ModelFileError, match=r"NAME-00001-of-00002\.gguf"):
        FORMAT.open(path)


@pytest.mark.parametrize("number", [0, 3])
def test_a_part_beyond_the_last(number: int, part: MakePart, tmp_path: Path) -> None:
    path = tmp_path / f"m-{number:05}-of-00002.gguf"
    path.write_bytes(part(0))
    with pytest.raises(ModelFileError, match=f"its name says part {number} of 2"):
        FORMAT.open(path)


def test_too_many_parts(part: MakePart, tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-60000.gguf"
    path.write_bytes(part(0, count=60_000))
    with pytest.raises(ModelFileError, match=f"60,000, over {limits.GGUF_PARTS:,}"):
        FORMAT.open(path)


def test_a_damaged_part_is_named(part: MakePart, refusal: Refusal) -> None:
    assert refusal(part(0), part(1)[:-1]).startswith("'m-00002-of-00002.gguf': offset of tensor")


def test_a_whole_model_may_be_named_like_a_part(tmp_path: Path, part: MakePart) -> None:
    path = tmp_path / "m-00001-of-00001.gguf"
    path.write_bytes(part(0, count=1, total=1))
    assert list(FORMAT.open(path).tensors) == ["t0"]
    shutil.copy(path, tmp_path / "other.gguf")
    assert list(FORMAT.open(tmp_path / "other.gguf").tensors) == ["t0"]
