"""One shard: written from a stream of tensors in a single pass, read back in a second.

A checksum of what is written is compared with that of what is read back, in the pass that also
takes the file's hash. Peak memory is one tensor and the shard's small parts, which stand at its
end.
"""

import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from llmrun.errors import InternalError, ModelFileError
from llmrun.formats.damage import shown
from llmrun.formats.finite import nonfinite_part
from llmrun.formats.layout import ALIGNMENT, Layout, Shard
from llmrun.formats.planned import Part, Planned
from llmrun.formats.safetensors_header import open_safetensors
from llmrun.kernels.forms import Dense, Form

_BLOCK_BYTES = 1 << 20


class ShardWriter:
    """A shard's file while it is written; ``add`` its tensors in order, then ``finish``."""

    def __init__(self, out: Path, shard: Shard, layout: Layout) -> None:
        self._path = out / shard.file
        self._shard = shard
        self._layout = layout
        self._checksum = 0
        self._last: list[tuple[Part, bytes]] = []
        self._file: BinaryIO = self._path.open("xb")
        self._write(shard.header)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, tensor: Planned, form: Form) -> int:
        """Write one tensor; return its stored bytes.

        ModelFileError if it is not finite, InternalError if it is not as planned.
        """
        check_finite(tensor.name, form)
        parts = self._shard.parts[tensor.name]
        contents = _contents(tensor, form, self._layout)
        if contents.keys() != {part.key for part in parts}:
            raise InternalError(f"{tensor.name} has other parts than planned.")
        for part in parts:
            data = contents[part.key]
            if data.nbytes != part.nbytes:
                raise InternalError(f"{part.key}: {data.nbytes} bytes, planned {part.nbytes}.")
            if part.nbytes % ALIGNMENT:
                self._last.append((part, bytes(data)))
            else:
                self._append(part, data)
        return sum(part.nbytes for part in parts)

    def finish(self) -> str:
        """Make the file durable, read it back and return its sha256; InternalError if it differs
        from what was written or the safetensors library does not read it as meant."""
        for part, data in sorted(self._last, key=lambda item: item[0].begin):
            self._append(part, data)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        checksum, digest = _read_back(self._path)
        if checksum != self._checksum:
            raise InternalError(f"Read back differently than written: {self._path.name}.")
        open_safetensors(self._path)
        _check_with_library(self._path, self._shard)
        return digest

    def _append(self, part: Part, data: memoryview | bytes) -> None:
        position = len(self._shard.header) + part.begin
        if self._file.tell() != position:
            raise InternalError(f"{part.key} was planned at {position:,}.")
        self._write(data)

    def _write(self, data: memoryview | bytes) -> None:
        self._checksum = zlib.crc32(data, self._checksum)
        self._file.write(data)


def _read_back(path: Path) -> tuple[int, str]:
    """The CRC-32 and the sha256 of a file."""
    checksum, digest = 0, hashlib.sha256()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum = zlib.crc32(block[:count], checksum)
            digest.update(block[:count])
    return checksum, digest.hexdigest()


def check_planned(planned: Planned, name: str, form: Form | None) -> None:
    """InternalError if a tensor of the stream (None: its end) is not the planned one."""
    if form is None or (name, form.kind, form.shape) != (
        planned.name,
        planned.kind.lower(),
        planned.shape,
    ):
        got = "the end" if form is None else f"{shown(name)} {form.kind} {form.shape}"
        raise InternalError(f"Planned {planned.name} {planned.kind} {planned.shape}, got {got}.")


def check_finite(name: str, form: Form) -> None:
    """ModelFileError for a tensor that holds a NaN or an infinity."""
    fault = nonfinite_part(form)
    if fault is not None:
        part, index = fault
        raise ModelFileError(
            f"Tensor {shown(name)} is not finite at element {index:,} of its {part}.",
            "The source model is damaged; fetch it again.",
        )


def _contents(tensor: Planned, form: Form, layout: Layout) -> Mapping[str, memoryview]:
    if isinstance(form, Dense):
        return {tensor.name: form.w.data}
    assert layout.writing is not None
    return layout.writing.contents(form, tensor, layout.scale_dtype)


def _check_with_library(path: Path, shard: Shard) -> None:
    from safetensors import SafetensorError, safe_open

    parts: Iterable[Part] = (part for own in shard.parts.values() for part in own)
    expected = {part.key: (part.dtype, list(part.shape)) for part in parts}
    try:
        with safe_open(path, framework="np") as opened:
            slices = {key: opened.get_slice(key) for key in sorted(opened.keys())}
            found = {key: (s.get_dtype(), list(s.get_shape())) for key, s in slices.items()}
    except SafetensorError as error:
        raise InternalError(f"The safetensors library refuses {path.name}: {error}.") from error
    if found != expected:
        raise InternalError(f"The safetensors library reads {path.name} differently.")
