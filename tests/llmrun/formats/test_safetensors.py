"""Folders with an index: exactly what it names is loaded, and disagreement is damage."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmrun.errors import ModelFileError
from llmrun.formats import limits
from llmrun.formats.open import open_checkpoint
from llmrun.formats.safetensors import INDEX_NAME, SINGLE_NAME

Folder = Callable[..., Path]


def _shard(st: SimpleNamespace, **tensors: list[int]) -> bytes:
    header, position = {}, 0
    for name, values in tensors.items():
        end = position + 4 * len(values)
        offsets = [position, end]
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": offsets}
        position = end
    data = b"".join(bytes([v] * 4) for values in tensors.values() for v in values)
    return st.file(header, data)


def _index(**weight_map: str) -> bytes:
    return json.dumps({"metadata": {"total_size": 7}, "weight_map": weight_map}).encode()


@pytest.fixture
def sharded(folder: Folder, st: SimpleNamespace) -> Path:
    return folder(
        {"model_type": "llama"},
        {
            "one.safetensors": _shard(st, a=[1], b=[2, 3]),
            "two.safetensors": _shard(st, c=[4]),
            INDEX_NAME: _index(a="one.safetensors", b="one.safetensors", c="two.safetensors"),
        },
    )


def _values(path: Path) -> dict[str, bytes]:
    opened = open_checkpoint(path)
    return {name: bytes(opened.read(name).arrays["w"].data) for name in opened.tensors}


def test_sharded_reading_equals_a_single_file(
    sharded: Path, st: SimpleNamespace, tmp_path: Path
) -> None:
    single = tmp_path / "single"
    single.mkdir()
    (single / "config.json").write_text("{}")
    (single / SINGLE_NAME).write_bytes(_shard(st, a=[1], b=[2, 3], c=[4]))
    assert _values(sharded) == _values(single)
    opened = open_checkpoint(sharded)
    assert opened.layout == "huggingface"
    assert opened.quantization is None
    assert opened.config == {"model_type": "llama"}
    assert (opened.tensors["b"].shape, opened.tensors["b"].kind) == ((2,), "F32")


def test_r072_missing_shards_are_named_before_anything_is_opened(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    (sharded / "one.safetensors").write_bytes(b"damaged too")
    with pytest.raises(ModelFileError, match=r"missing: two\.safetensors") as caught:
        open_checkpoint(sharded)
    assert "pull" in caught.value.next_step


def test_r073_a_short_shard_is_found_at_open(sharded: Path) -> None:
    shard = sharded / "two.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"two\.safetensors.*shorter"):
        open_checkpoint(sharded)


def test_r074_stray_files_are_not_touched(sharded: Path, st: SimpleNamespace) -> None:
    (sharded / "adapter.safetensors").write_bytes(_shard(st, a=[9]))
    (sharded / SINGLE_NAME).write_bytes(b"not even a file")
    assert _values(sharded) == {"a": b"\1" * 4, "b": b"\2" * 4 + b"\3" * 4, "c": b"\4" * 4}


def test_r075_shard_names_are_free(folder: Folder, st: SimpleNamespace) -> None:
    name = "model-00001-of-00003.safetensors-00001-of-00001.safetensors"
    made = folder({}, {name: _shard(st, a=[1]), INDEX_NAME: _index(a=name)})
    assert list(open_checkpoint(made).tensors) == ["a"]


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:x.safetensors",
        "x\0.safetensors",
        "NUL.safetensors",
        "com1.safetensors",
        "x.bin",
        "",
        "..",
        "x.safetensors ",
        "x\u202e.safetensors",
        "x" * 256 + ".safetensors",
    ],
)
def test_sec06_hostile_shard_names(name: str, folder: Folder, st: SimpleNamespace) -> None:
    made = folder({}, {"one.safetensors": _shard(st, a=[1])})
    (made / INDEX_NAME).write_bytes(json.dumps({"weight_map": {"a": name}}).encode())
    with pytest.raises(ModelFileError, match="is not a plain name"):
        open_checkpoint(made)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": {"a": 1}}', "'a' is not mapped"),
        (b'{"weight_map": {"a": "one.safetensors", "a": "one.safetensors"}}', "'a' twice"),
        (_index(a="one.safetensors", x="one.safetensors"), "maps 'x' to one.safetensors, which"),
        (_index(b="one.safetensors"), "does not map 'a'"),
    ],
)
def test_sec06_bad_index(index: bytes, words: str, folder: Folder, st: SimpleNamespace) -> None:
    made = folder({}, {"one.safetensors": _shard(st, a=[1]), INDEX_NAME: index})
    with pytest.raises(ModelFileError, match=words):
        open_checkpoint(made)


@pytest.mark.slow
def test_sec06_index_limits(
    folder: Folder, st: SimpleNamespace, refused: Callable[..., str]
) -> None:
    made = folder({}, {"one.safetensors": _shard(st, a=[1])})

    def check(content: bytes) -> str:
        def opener(path: Path) -> object:
            (made / INDEX_NAME).write_bytes(path.read_bytes())
            return open_checkpoint(made)

        return refused(opener, content, INDEX_NAME)

    many = {f"layers.{n}.weight": "one.safetensors" for n in range(limits.INDEX_ENTRIES + 1)}
    assert "100,001 entries" in check(_index(**many))
    assert "more than the 12,582,912" in check(b" " * (limits.INDEX.max_bytes + 1))
    assert "over 64" in check(b'{"a":[' + b"{}," * 4_000_000 + b"{}]}")


def test_sec06_a_shard_that_is_a_link_out_is_refused(sharded: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (sharded / "two.safetensors").rename(outside)
    (sharded / "two.safetensors").symlink_to(outside)
    with pytest.raises(ModelFileError, match="symbolic link"):
        open_checkpoint(sharded)


def test_the_hub_cache_may_link_to_its_blobs(sharded: Path, tmp_path: Path) -> None:
    expected = _values(sharded)
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert _values(snapshot) == expected


def test_several_files_without_an_index(folder: Folder, st: SimpleNamespace) -> None:
    made = folder({}, {f"{name}.safetensors": _shard(st, a=[1]) for name in "xy"})
    with pytest.raises(ModelFileError, match=r"index\.json is missing"):
        open_checkpoint(made)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_r112_small_floats_without_a_scale_are_refused_at_once(
    folder: Folder, st: SimpleNamespace, dtype: str
) -> None:
    header = {"f8.weight": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2]}}
    made = folder({}, {SINGLE_NAME: st.file(header, bytes(2))})
    with pytest.raises(ModelFileError, match=f"'f8.weight' has dtype {dtype}, and nothing says"):
        open_checkpoint(made)


@pytest.mark.parametrize(("dtype", "nbytes"), [("U8", 1), ("I8", 1), ("I64", 8), ("F64", 8)])
def test_r112_a_dtype_that_is_no_weight_is_named(
    folder: Folder, st: SimpleNamespace, dtype: str, nbytes: int
) -> None:
    header = {"other": {"dtype": dtype, "shape": [1], "data_offsets": [0, nbytes]}}
    opened = open_checkpoint(folder({}, {SINGLE_NAME: st.file(header, bytes(nbytes))}))
    with pytest.raises(ModelFileError, match=f"'other' has dtype {dtype}; a weight is F32"):
        opened.read("other")


def test_each_tensor_keeps_its_own_type(folder: Folder, st: SimpleNamespace) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "BF16", "shape": [1], "data_offsets": [4, 6]},
        "c": {"dtype": "F16", "shape": [1], "data_offsets": [6, 8]},
    }
    opened = open_checkpoint(folder({}, {SINGLE_NAME: st.file(header, bytes(8))}))
    assert [opened.read(name).kind for name in "abc"] == ["f32", "bf16", "f16"]


@pytest.mark.parametrize("part", ["qweight", "weight_packed"])
def test_packed_weights_of_which_the_config_says_nothing(
    part: str, folder: Folder, st: SimpleNamespace
) -> None:
    """Early GPTQ folders have a quantize_config.json alone."""
    path = folder({}, {SINGLE_NAME: _shard(st, **{"a.weight": [1], f"b.q_proj.{part}": [2]})})
    with pytest.raises(
        ModelFileError, match=rf"no quantization_config.*'b\.q_proj\.{part}'"
    ) as caught:
        open_checkpoint(path)
    assert "quantized" in caught.value.next_step
