"""SEC-06: every rule has a file that breaks it; good files are read as the library reads them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors import SafetensorError

from llmrun.errors import ModelFileError
from llmrun.formats import limits
from llmrun.formats.safetensors_header import BITS, open_safetensors
from llmrun.kernels.host import DType

Refused = Callable[..., str]


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONE = entry("F32", [2], 0, 8)
BAD_HEADERS: dict[str, tuple[object, int, str]] = {
    # name: header, bytes of data, words of the message
    "not an object": (b"[]", 0, "not a JSON object"),
    "not JSON": (b"{" + b" " * 20, 0, "not valid JSON"),
    "not UTF-8": (b'{"\xff":1}', 0, "not valid JSON"),
    "duplicate names": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "'a' twice",
    ),
    "equal after normalising": (
        {"\u00e9": ONE, "e\u0301": entry("U8", [0], 8, 8)},
        8,
        "equal after",
    ),
    "lone surrogate": (
        b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "Unicode",
    ),
    "unknown dtype": ({"t": entry("F7", [1], 0, 1)}, 1, "'t': unknown dtype 'F7'"),
    "dtype is no string": ({"t": entry(7, [1], 0, 1)}, 1, "unknown dtype 7"),
    "product overflow": ({"t": entry("U8", [2**40, 2**40, 0], 0, 0)}, 0, "overflows"),
    "negative extent": ({"t": entry("U8", [-1], 0, 1)}, 1, "non-negative"),
    "fractional extent": ({"t": entry("U8", [1.0], 0, 1)}, 1, "non-negative"),
    "true as an extent": ({"t": entry("U8", [True], 0, 1)}, 1, "non-negative"),
    "shape is no list": ({"t": entry("U8", "1", 0, 1)}, 1, "non-negative"),
    "negative offset": ({"t": entry("U8", [1], -1, 0)}, 1, "data_offsets"),
    "reversed offsets": ({"t": entry("U8", [1], 1, 0)}, 1, "reversed"),
    "three offsets": ({"t": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, 1, "two"),
    "overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6, "overlaps"),
    "same place": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, 4, "overlaps"),
    "gap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 5, 9)}, 9, "gap"),
    "gap at the start": ({"a": entry("U8", [4], 1, 5)}, 5, "gap"),
    "past the end": ({"a": ONE}, 7, "shorter"),
    "trailing bytes": ({"a": ONE}, 9, "longer"),
    "wrong length": ({"a": entry("F32", [2], 0, 7)}, 7, "needs 64 bits"),
    "half a byte": ({"a": entry("F4", [3], 0, 1)}, 1, "needs 12 bits"),
    "huge integer": (
        b'{"t":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}',
        1,
        "",
    ),
    "entry is no object": ({"t": 1}, 0, "entry is not"),
    "missing key": ({"t": {"dtype": "U8", "shape": [1]}}, 1, "entry is not"),
    "unknown key": ({"t": {**ONE, "strides": [1]}}, 8, "entry is not"),
    "metadata is no object": ({"__metadata__": "x", "a": ONE}, 8, "__metadata__"),
    "metadata is no string": ({"__metadata__": {"n": 1}, "a": ONE}, 8, "__metadata__"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_sec06_bad_header(case: str, st: SimpleNamespace, refused: Refused) -> None:
    header, size, words = BAD_HEADERS[case]
    assert words in refused(open_safetensors, st.file(header, bytes(size)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        (struct.pack("<Q", 0) + b"{}", "length is 0"),
        (struct.pack("<Q", 100) + b"{}", "past the file"),
        (struct.pack("<Q", limits.SAFETENSORS_HEADER.max_bytes + 1) + b"{}", "over 8,388,608"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "over 8,388,608"),
        (struct.pack("<Q", 3) + b" {}", "not a JSON object"),
    ],
)
def test_sec06_bad_length(content: bytes, words: str, refused: Refused) -> None:
    assert words in refused(open_safetensors, content)


_MOST = limits.SAFETENSORS_HEADER
BOMBS = {
    "empty lists": b'{"a":[' + b"[]," * (_MOST.max_bytes // 3 - 10) + b"[]]}",
    "empty objects": b'{"a":[' + b"{}," * (_MOST.max_bytes // 3 - 10) + b"{}]}",
    "legal count of objects": b'{"a":[' + b"{}," * (_MOST.braces - 2) + b"{}]}",
    "legal count of lists": b'{"a":[' + b"[]," * (_MOST.brackets - 2) + b"[]]}",
    "numbers": b'{"a":[' + b"1," * (_MOST.max_bytes // 2 - 10) + b"1]}",
    "legal count of numbers": b'{"a":[' + b"12345678," * (_MOST.commas - 1) + b"1]}",
    "deep lists": b'{"a":' + b"[" * _MOST.brackets + b"]" * _MOST.brackets + b"}",
    "one long string": b'{"a":"' + b"x" * (_MOST.max_bytes - 8) + b'"}',
    "one long number": b'{"a":' + b"1" * (_MOST.max_bytes - 6) + b"}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_sec06_bomb(bomb: str, st: SimpleNamespace, refused: Refused) -> None:
    refused(open_safetensors, st.file(BOMBS[bomb]))


@pytest.mark.slow
def test_sec06_tensor_count(st: SimpleNamespace, refused: Refused, tmp_path: Path) -> None:
    most = limits.SAFETENSORS_TENSORS
    full = {f"t{index}": entry("U8", [1], index, index + 1) for index in range(most)}
    path = tmp_path / "full"
    path.write_bytes(st.file(full, bytes(most)))
    assert len(open_safetensors(path)) == most
    full["one more"] = entry("U8", [0], most, most)
    assert "32,769 tensors" in refused(open_safetensors, st.file(full, bytes(most)))


def test_r112_every_known_dtype_is_measured_and_the_unreadable_is_named(
    st: SimpleNamespace, tmp_path: Path
) -> None:
    path = tmp_path / "all.safetensors"
    header, position = {}, 0
    for dtype, bits in BITS.items():
        header[dtype] = entry(dtype, [4, 2], position, position + bits)
        position += bits
    content = st.file(header, bytes(range(256)) * 3)[: position - 768 or None]
    path.write_bytes(content)
    tensors = open_safetensors(path)
    oracle = dict(safetensors.deserialize(content))
    assert set(BITS) == set(oracle)
    for name, tensor in tensors.items():
        assert bytes(tensor.data) == bytes(oracle[name]["data"])
        if name in DType.__members__:
            assert tensor.array().dtype.name == name
        else:
            with pytest.raises(ModelFileError, match=rf"'{name}' has dtype {name}"):
                tensor.array()


GOOD = {
    "__metadata__": {"format": "pt"},
    "b": entry("BF16", [2, 3], 0, 12),
    "e": entry("F32", [0, 4], 12, 12),
    "u": entry("U8", [], 12, 13),
}
GOOD_DATA = bytes(range(1, 14))


def _same_as_library(path: Path, content: bytes) -> None:
    """Either a named error, or what the library reads."""
    path.write_bytes(content)
    try:
        ours = open_safetensors(path)
    except ModelFileError:
        return
    try:
        theirs = dict(safetensors.deserialize(content))
    except SafetensorError as error:
        pytest.fail(f"llmrun reads what the library refuses: {error}")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor.dtype, list(tensor.shape)) == (other["dtype"], list(other["shape"]))
        assert bytes(tensor.data) == bytes(other["data"])


def test_cut_at_every_byte(st: SimpleNamespace, tmp_path: Path) -> None:
    content = st.file(GOOD, GOOD_DATA)
    path = tmp_path / "cut"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            open_safetensors(path)
    path.write_bytes(content)
    assert list(open_safetensors(path)) == ["b", "e", "u"]


@pytest.mark.slow
def test_every_header_bit_flipped(st: SimpleNamespace, tmp_path: Path) -> None:
    content = st.file(GOOD, GOOD_DATA)
    for bit in range(8 * (len(content) - len(GOOD_DATA))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        _same_as_library(tmp_path / "flipped", bytes(flipped))


@settings(max_examples=150, deadline=None)
@given(
    tensors=some.lists(
        some.tuples(
            some.text(max_size=6),
            some.sampled_from(sorted(BITS)),
            some.lists(some.integers(0, 4), max_size=4),
        ),
        max_size=8,
    ),
    seed=some.binary(max_size=64),
)
def test_any_structure_reads_as_the_library_reads_it(
    tensors: list[tuple[str, str, list[int]]],
    seed: bytes,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    header, position = {}, 0
    for name, dtype, shape in tensors:
        bits = BITS[dtype]
        for extent in shape:
            bits *= extent
        header[name] = entry(dtype, shape, position, position + bits // 8)
        position += bits // 8
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + (seed * (position + 1))[:position]
    _same_as_library(tmp_path_factory.getbasetemp() / "any", content)


@settings(max_examples=300, deadline=None)
@given(content=some.binary(max_size=200))
def test_any_bytes_end_in_a_named_error(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    for prefix in (b"", struct.pack("<Q", max(len(content), 1))):
        _same_as_library(path, prefix + content)
