"""The pre-check of a GGUF file: every number is held against the bytes that remain.

Any fault is a ModelFileError naming the field and its offset. The walk keeps only offsets;
metadata becomes Python values when it is looked up. Versions 2 and 3, little-endian.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.formats import limits
from llmrun.formats.damage import FETCH_AGAIN, damaged, shown
from llmrun.formats.gguf_values import STRING, UINT32, Cursor, Metadata, Value, walk_value
from llmrun.quant.gguf_blocks import BLOCK_TYPES

TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"} | {
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS"},
    **{17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
"""Tensor types by number, for messages; those in LAYOUT are read."""

LAYOUT = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)} | {
    name: (kind.weights, kind.nbytes) for name, kind in BLOCK_TYPES.items()
}
"""Weights and bytes per block of the types llmrun decodes."""

_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as the table describes it; ``shape`` has the rows first.

    Its data are the bytes from ``start`` to ``end`` of the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(view: memoryview, path: Path) -> tuple[Metadata, tuple[GgufTensor, ...]]:
    """Check the whole header of a mapped file; return its metadata and tensor table.

    The table is empty only in a part of a split model: one file of it may hold the metadata alone.
    """
    cursor = Cursor(view, path)
    cursor.need(4, "magic")
    if view[:4] != _MAGIC:
        raise cursor.refused("magic", f"{shown(bytes(view[:4]))} is not GGUF")
    cursor.position = 4
    _check_version(cursor)
    tensor_count = cursor.number(8, "tensor count")
    key_count = cursor.number(8, "key count")
    if key_count > limits.GGUF_KEYS or 14 * key_count > view.nbytes - cursor.position:
        raise cursor.refused("key count", f"{key_count:,} is too many", 16)
    if tensor_count > limits.GGUF_TENSORS or 33 * tensor_count > view.nbytes - cursor.position:
        raise cursor.refused("tensor count", f"{tensor_count:,} is too many", 8)
    places: dict[str, Value] = {}
    for _ in range(key_count):
        start = cursor.position
        key = cursor.name(limits.GGUF_KEY_BYTES, "key")
        if key in places:
            raise cursor.refused("key", f"{shown(key)} occurs twice", start)
        places[key] = walk_value(cursor, key)
    metadata = Metadata(view, path, places)
    if tensor_count == 0 and metadata.get("split.count", 0) in (0, 1):
        raise cursor.refused("tensor count", "no tensors, a vocabulary-only file", 8)
    alignment = _alignment(cursor, places)
    infos = _tensor_infos(cursor, tensor_count)
    tensors = _place_tensors(cursor, infos, alignment)
    _check_metadata(metadata)
    return metadata, tensors


def _check_version(cursor: Cursor) -> None:
    version = cursor.number(4, "version")
    if version in (2, 3):
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if 0 < swapped < 4:
        raise cursor.refused("version", "the file is big-endian, which llmrun does not read", 4)
    raise cursor.refused("version", f"version {version}; llmrun reads 2 and 3", 4)


def _alignment(cursor: Cursor, places: Mapping[str, Value]) -> int:
    place = places.get("general.alignment")
    if place is None:
        return 32
    if place.kind != UINT32:
        raise cursor.refused("general.alignment", "is not an unsigned 32-bit number", place.offset)
    alignment = int.from_bytes(cursor.view[place.offset : place.offset + 4], "little")
    least, most = limits.GGUF_ALIGNMENT
    if not least <= alignment <= most or alignment & (alignment - 1):
        problem = f"{alignment} is no power of two from {least} to {most:,}"
        raise cursor.refused("general.alignment", problem, place.offset)
    return alignment


@dataclass(frozen=True, slots=True)
class _Info:
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    place: int


def _tensor_infos(cursor: Cursor, count: int) -> list[_Info]:
    infos: dict[str, _Info] = {}
    for _ in range(count):
        start = cursor.position
        name = cursor.name(limits.GGUF_TENSOR_NAME_BYTES, "tensor name")
        if name in infos:
            raise cursor.refused("tensor name", f"{shown(name)} occurs twice", start)
        infos[name] = _tensor_info(cursor, name)
    return list(infos.values())


def _tensor_info(cursor: Cursor, name: str) -> _Info:
    tensor = f"tensor {shown(name)}"
    rank = cursor.number(4, f"number of dimensions of {tensor}")
    if not 1 <= rank <= limits.GGUF_DIMS:
        problem = f"{rank}, not 1 to {limits.GGUF_DIMS}"
        raise cursor.refused(f"number of dimensions of {tensor}", problem, cursor.position - 4)
    dims = []
    for _ in range(rank):
        extent = cursor.number(8, f"dimension of {tensor}")
        if not 1 <= extent <= limits.GGUF_DIM:
            raise cursor.refused(f"dimension of {tensor}", f"{extent:,}", cursor.position - 8)
        dims.append(extent)
    number = cursor.number(4, f"type of {tensor}")
    kind = TYPES.get(number, f"unknown type {number}")
    if kind not in LAYOUT:
        raise ModelFileError(
            f"{shown(cursor.path.name)}: type of {tensor} at byte {cursor.position - 4:,}: {kind}, "
            f"which llmrun does not decode. It decodes {', '.join(LAYOUT)}.",
            "Use another quantization of this model, or its safetensors version.",
        )
    if dims[0] % LAYOUT[kind][0]:
        problem = f"{dims[0]:,} is no multiple of {kind}'s block of {LAYOUT[kind][0]}"
        raise cursor.refused(f"dimension of {tensor}", problem)
    offset = cursor.number(8, f"offset of {tensor}")
    return _Info(name, kind, tuple(reversed(dims)), offset, cursor.position - 8)


def _place_tensors(cursor: Cursor, infos: list[_Info], alignment: int) -> tuple[GgufTensor, ...]:
    """Check that the tensors follow each other without gap or overlap up to the file's end."""
    size = cursor.view.nbytes
    data = -(-cursor.position // alignment) * alignment
    expected = end = 0
    tensors = []
    for info in infos:
        if info.offset != expected:
            problem = f"{info.offset:,}, but the tensor before ends at {expected:,}"
            raise cursor.refused(f"offset of tensor {shown(info.name)}", problem, info.place)
        block, block_bytes = LAYOUT[info.kind]
        weights = 1
        for extent in info.shape:
            weights *= extent
        end = info.offset + weights // block * block_bytes
        if data + end > size:
            problem = f"its data ends at {data + end:,}, the file at {size:,}"
            raise cursor.refused(f"offset of tensor {shown(info.name)}", problem, info.place)
        place = (data + info.offset, data + end)
        tensors.append(GgufTensor(info.name, info.kind, info.shape, *place))
        expected = -(-end // alignment) * alignment
    if size - data - end >= alignment:
        raise cursor.refused(
            "end", f"{size - data - end:,} bytes follow the last tensor", data + end
        )
    return tuple(tensors)


def _check_metadata(metadata: Metadata) -> None:
    """Check what keys say about each other."""
    places = metadata.places

    def refused(key: str, problem: str) -> ModelFileError:
        what = f"{key} at byte {places[key].offset:,}: {problem}"
        return damaged(metadata.path, what, FETCH_AGAIN)

    tokens = places.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    if tokens.element != STRING:
        raise refused("tokenizer.ggml.tokens", "is not a list of strings")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if key in places and places[key].count != tokens.count:
            raise refused(key, f"{places[key].count:,} values for {tokens.count:,} tokens")
    for key in places:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            value = metadata[key]
            if type(value) is not int or not 0 <= value < tokens.count:
                raise refused(key, f"{shown(value)} is no id below {tokens.count:,}")
