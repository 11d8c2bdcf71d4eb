"""The pre-check of a safetensors file: nothing is believed before it fits the file.

A file is 8 bytes of header length, a JSON header, then the tensors without gap or overlap. Every
rule that fails is a ModelFileError naming the file and the tensor. No tensor byte is read.
"""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.formats.bounded_json import parse_object
from llmrun.formats.damage import damaged, shown
from llmrun.formats.limits import ELEMENTS, SAFETENSORS_HEADER, SAFETENSORS_TENSORS
from llmrun.formats.mapping import map_file, passing
from llmrun.kernels.host import DType, HostArray

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Width in bits of every element type the format knows; llmrun computes with a few of them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in a file that ``map_file`` mapped, from byte ``start`` to ``end``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: memoryview
    start: int
    end: int
    path: Path

    @property
    def data(self) -> memoryview:
        """Its bytes, for somebody who reads them once (see ``mapping.passing``)."""
        return passing(self.file, self.start, self.end)

    @property
    def nbytes(self) -> int:
        """Number of its bytes."""
        return self.end - self.start

    def array(self) -> HostArray:
        """Return it as an array; ModelFileError for a dtype llmrun has no array for."""
        if self.dtype not in DType.__members__:
            raise self.refused(f"has dtype {self.dtype}, which llmrun does not read")
        return HostArray(DType[self.dtype], self.shape, self.data)

    def refused(self, problem: str) -> ModelFileError:
        """Return the error that names this tensor and its file."""
        return damaged(self.path, f"tensor {shown(self.name)} {problem}")


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Check a file's header and return its tensors by name, in file order."""
    view = map_file(path)
    size = view.nbytes
    if size < 8:
        raise damaged(path, f"{size} bytes are too few for a safetensors file")
    length = int.from_bytes(view[:8], "little")
    if length == 0:
        raise damaged(path, "the header length is 0")
    if length > SAFETENSORS_HEADER.max_bytes:
        most = SAFETENSORS_HEADER.max_bytes
        raise damaged(path, f"the header length is {length:,}, over {most:,} bytes")
    if 8 + length > size:
        raise damaged(path, f"the header of {length:,} bytes runs past the file's {size:,}")
    if view[8] != ord("{"):
        raise damaged(path, "the header is not a JSON object")
    header = parse_object(bytes(view[8 : 8 + length]), SAFETENSORS_HEADER, path, "the header")
    _check_metadata(header.pop("__metadata__", None), path)
    if len(header) > SAFETENSORS_TENSORS:
        raise damaged(path, f"{len(header):,} tensors, over {SAFETENSORS_TENSORS:,}")
    _check_names(header, path)
    places = {name: _place(name, entry, path) for name, entry in header.items()}
    first = 8 + length
    _check_cover(places, size - first, path)
    return {
        name: StoredTensor(name, dtype, shape, view, first + begin, first + end, path)
        for name, (dtype, shape, begin, end) in sorted(
            places.items(), key=lambda item: (item[1][2], item[1][3])
        )
    }


_Place = tuple[str, tuple[int, ...], int, int]


def _check_metadata(metadata: object, path: Path) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged(path, "__metadata__ holds something else than strings")


def _check_names(header: Mapping[str, object], path: Path) -> None:
    normal: dict[str, str] = {}
    for name in header:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise damaged(path, f"tensor name {shown(name)} is not valid Unicode") from error
        form = name if name.isascii() else unicodedata.normalize("NFKC", name)
        if form in normal:
            both = f"{shown(normal[form])} and {shown(name)}"
            raise damaged(path, f"tensor names {both} are equal after normalising")
        normal[form] = name


def _place(name: str, entry: object, path: Path) -> _Place:
    """Check one header entry by itself; return dtype, shape, begin and end."""

    def refused(problem: str) -> ModelFileError:
        return damaged(path, f"tensor {shown(name)}: {problem}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refused("the entry is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise refused(f"unknown dtype {shown(dtype)}")
    if not _counts(shape):
        raise refused("the shape is not a list of non-negative integers")
    elements = 1
    for extent in shape:
        elements *= extent
        if elements > ELEMENTS:
            raise refused("the shape's product overflows")
    if not _counts(offsets) or len(offsets) != 2:
        raise refused("data_offsets are not two non-negative integers")
    begin, end = offsets
    if begin > end:
        raise refused(f"data_offsets {begin} and {end} are reversed")
    bits = elements * BITS[dtype]
    if bits != 8 * (end - begin):
        raise refused(f"{end - begin:,} bytes, but {dtype} {shown(tuple(shape))} needs {bits} bits")
    return dtype, tuple(shape), begin, end


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(places: Mapping[str, _Place], size: int, path: Path) -> None:
    position = 0
    for name, (_, _, begin, end) in sorted(places.items(), key=lambda p: (p[1][2], p[1][3])):
        if begin != position:
            fault = "overlaps the one before" if begin < position else "leaves a gap before it"
            raise damaged(path, f"tensor {shown(name)} at {begin:,} {fault}")
        position = end
    if position != size:
        fault = "shorter" if size < position else "longer"
        raise damaged(path, f"the file is {fault} than its header says ({size:,}, {position:,})")
