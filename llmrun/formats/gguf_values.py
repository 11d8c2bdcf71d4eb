"""Values in a GGUF header: walked over with every length checked, decoded when looked up.

Nothing is allocated or skipped on a file's word. Any fault is a ModelFileError naming the field
and its offset. Python integers throughout: they cannot overflow.
"""

import contextlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.formats import limits
from llmrun.formats.damage import damaged, shown
from llmrun.kernels.cpu import gguf as native
from llmrun.kernels.cpu import library

UINT32, _BOOL, STRING, _ARRAY = 4, 7, 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Value:
    """Where a metadata value lies: its type, first byte and, in an array, elements."""

    kind: int
    offset: int
    element: int = 0
    count: int = 0


@dataclass
class Cursor:
    """A position in the header and the checks on what is read there."""

    view: memoryview
    path: Path
    position: int = 0
    strings: int = 0

    def refused(self, what: str, problem: str, offset: int | None = None) -> ModelFileError:
        """Return the error for a field, by default at the current position."""
        at = self.position if offset is None else offset
        return damaged(self.path, f"{what} at byte {at:,}: {problem}")

    def need(self, count: int, what: str) -> None:
        """Refuse ``count`` bytes that the file, or a header of legal size, does not have."""
        end = self.position + count
        if end > self.view.nbytes:
            left = self.view.nbytes - self.position
            raise self.refused(what, f"needs {count:,} bytes, {left:,} remain")
        if end > limits.GGUF_HEADER_BYTES:
            raise self.refused(what, f"the header is over {limits.GGUF_HEADER_BYTES:,} bytes")

    def number(self, size: int, what: str) -> int:
        """Read an unsigned number of ``size`` bytes."""
        self.need(size, what)
        start = self.position
        self.position += size
        return int.from_bytes(self.view[start : self.position], "little")

    def skip_string(self, most: int, what: str) -> tuple[int, int]:
        """Return the begin and end of a string's bytes."""
        length = self.number(8, f"length of {what}")
        if length > most:
            raise self.refused(what, f"{length:,} bytes, over {most:,}", self.position - 8)
        self.need(length, what)
        start = self.position
        self.position += length
        return start, self.position

    def name(self, most: int, what: str) -> str:
        """Read a non-empty string of printable ASCII."""
        start, end = self.skip_string(most, what)
        raw = bytes(self.view[start:end])
        text = raw.decode("latin-1")
        if not raw or not raw.isascii() or not text.isprintable():
            raise self.refused(what, f"{shown(text)} is not printable ASCII", start)
        return text


@dataclass(frozen=True, eq=False)
class Metadata(Mapping[str, object]):
    """A GGUF's keys; a value is decoded (and kept) when it is first looked up.

    Values are int, float, bool, str or a list of one of them. A string that is not UTF-8 is a
    ModelFileError then.
    """

    view: memoryview
    path: Path
    places: Mapping[str, Value]
    decoded: dict[str, object] = field(default_factory=dict, repr=False)

    def __getitem__(self, key: str) -> object:
        if key not in self.decoded:
            self.decoded[key] = self._decode(key, self.places[key])
        return self.decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def _decode(self, key: str, value: Value) -> object:
        if value.kind == _ARRAY and value.element == STRING:
            return self._strings(key, value)
        if value.kind == STRING:
            return self._strings(key, Value(_ARRAY, value.offset, STRING, 1))[0]
        code = _SCALARS[value.element if value.kind == _ARRAY else value.kind]
        if value.kind == _ARRAY:
            return list(struct.unpack_from(f"<{value.count}{code}", self.view, value.offset))
        return struct.unpack_from(f"<{code}", self.view, value.offset)[0]

    def _strings(self, key: str, value: Value) -> list[str]:
        joined = None
        if library.problem() is None:
            joined = native.joined_strings(self.view[value.offset :], value.count)
        if joined:
            with contextlib.suppress(UnicodeDecodeError):  # below it is found and named
                return joined.decode("utf-8").split("\0")[:-1]
        view, position, read = self.view, value.offset, _U64.unpack_from
        texts = []
        try:
            for _ in range(value.count):
                start = position + 8
                position = start + read(view, position)[0]
                texts.append(str(view[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            problem = f"{shown(key)} at byte {start:,}: not valid UTF-8"
            raise damaged(self.path, problem) from error
        return texts


def walk_value(cursor: Cursor, key: str) -> Value:
    """Step over the value of a key and return where it lies."""
    what = f"value of {shown(key)}"
    kind = cursor.number(4, f"type of {shown(key)}")
    start = cursor.position
    if kind == _ARRAY:
        return _walk_array(cursor, what)
    if kind == STRING:
        whole = key == "tokenizer.huggingface.json"
        most = limits.GGUF_TOKENIZER_JSON_BYTES if whole else limits.GGUF_STRING_BYTES
        cursor.skip_string(most, what)
        return Value(kind, start)
    if kind not in _SCALARS:
        raise cursor.refused(f"type of {shown(key)}", f"unknown type {kind}", start - 4)
    raw = cursor.number(struct.calcsize(f"<{_SCALARS[kind]}"), what)
    if kind == _BOOL and raw > 1:
        raise cursor.refused(what, f"{raw} is neither false nor true", start)
    return Value(kind, start)


def _walk_array(cursor: Cursor, what: str) -> Value:
    kind = cursor.number(4, f"element type of {what}")
    count = cursor.number(8, f"length of {what}")
    start = cursor.position
    if kind != STRING and kind not in _SCALARS:
        problem = "nested arrays are not read" if kind == _ARRAY else f"unknown type {kind}"
        raise cursor.refused(f"element type of {what}", problem, start - 12)
    if count > limits.GGUF_ARRAY_ELEMENTS:
        most = limits.GGUF_ARRAY_ELEMENTS
        raise cursor.refused(f"length of {what}", f"{count:,} elements, over {most:,}", start - 8)
    if kind == STRING:
        _skip_strings(cursor, count, what)
        return Value(_ARRAY, start, kind, count)
    size = count * struct.calcsize(f"<{_SCALARS[kind]}")
    cursor.need(size, what)
    if kind == _BOOL and bytes(cursor.view[start : start + size]).strip(b"\0\1"):
        raise cursor.refused(what, "an element is neither false nor true", start)
    cursor.position += size
    return Value(_ARRAY, start, kind, count)


def _skip_strings(cursor: Cursor, count: int, what: str) -> None:
    """Walk over an array of strings; the one loop whose speed decides a file's opening time."""
    cursor.strings += count
    if cursor.strings > limits.GGUF_STRINGS:
        raise cursor.refused(what, f"over {limits.GGUF_STRINGS:,} strings in all")
    cursor.need(8 * count, what)
    view, position, read = cursor.view, cursor.position, _U64.unpack_from
    end = min(view.nbytes, limits.GGUF_HEADER_BYTES)
    last, most = end - 8, limits.GGUF_ELEMENT_BYTES
    if position < end and library.problem() is None:
        taken = native.skip_strings(view[position:end], count, most)
        if taken is not None:
            cursor.position = position + taken
            return
    # Without the library, and where something is wrong: found and named here.
    for index in range(count):
        if position > last:
            cursor.position = position
            cursor.need(8, f"length of element {index:,} of {what}")
        length = read(view, position)[0]
        if length > most:
            problem = f"{length:,} bytes, over {most:,}"
            raise cursor.refused(f"element {index:,} of {what}", problem, position)
        position += 8 + length
    cursor.position = min(position, view.nbytes)
    cursor.need(position - cursor.position, what)
