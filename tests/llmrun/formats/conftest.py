"""Makers of tiny model files, byte by byte, and the budget every refusal must keep."""

import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmrun.errors import ModelFileError


def _safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.fixture(scope="session")
def st() -> SimpleNamespace:
    """``st.file(header, data, length)``: a safetensors file."""
    return SimpleNamespace(file=_safetensors)


_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str | bytes, kind: int, value: object) -> bytes:
    head = _string(name) + struct.pack("<I", kind)
    if kind == 8:
        return head + _string(value)  # type: ignore[arg-type]
    return head + struct.pack(f"<{_CODES[kind]}", value)


def _array(name: str, kind: int, values: Sequence[object], count: int | None = None) -> bytes:
    number = len(values) if count is None else count
    head = _string(name) + struct.pack("<IIQ", 9, kind, number)
    if kind == 8:
        return head + b"".join(_string(value) for value in values)  # type: ignore[arg-type]
    return head + struct.pack(f"<{len(values)}{_CODES.get(kind, 'B')}", *values)


def _tensor(
    name: str | bytes, dims: Sequence[int], kind: int, offset: int, rank: int = -1
) -> bytes:
    number = len(dims) if rank < 0 else rank
    return (
        _string(name)
        + struct.pack("<I", number)
        + b"".join(struct.pack("<Q", extent) for extent in dims)
        + struct.pack("<IQ", kind, offset)
    )


def _gguf(
    keys: Sequence[bytes],
    tensors: Sequence[bytes],
    data: bytes,
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


@pytest.fixture(scope="session")
def gg() -> SimpleNamespace:
    """``gg.file, gg.key, gg.array, gg.tensor, gg.string``: the pieces of a GGUF file."""
    return SimpleNamespace(file=_gguf, key=_key, array=_array, tensor=_tensor, string=_string)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """``refused(opener, content, name)``: the message; exit 5 within a second and 64 MiB."""

    def check(
        opener: Callable[[Path], object], content: bytes, name: str = "file", memory: bool = True
    ) -> str:
        path = tmp_path / name
        path.write_bytes(content)
        start = time.process_time()
        with pytest.raises(ModelFileError) as caught:
            opener(path)
        assert time.process_time() - start < 1
        assert caught.value.exit_code == 5
        if memory and len(content) > 100_000:
            tracemalloc.start()
            with pytest.raises(ModelFileError):
                opener(path)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 64 << 20
        assert name in str(caught.value)
        return caught.value.what

    return check


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(config, **files)``: a model folder with config.json and other files."""

    def make(config: Mapping[str, object], files: Mapping[str, bytes] | None = None) -> Path:
        made = tmp_path / "model"
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config))
        for name, content in (files or {}).items():
            (made / name).write_bytes(content)
        return made

    return make
