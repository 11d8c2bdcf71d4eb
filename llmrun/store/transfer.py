"""One file of a hub into a private folder, verified: resume or restart, never guess.

A partial file is continued only if the server proves, by the same strong etag and a 206 with
exactly the missing range, that it serves the same object; the hashes are rebuilt from the bytes
on disk. A file gets its name only after length and hash match and its bytes are durable. Right
length with wrong bytes is fetched once more from the start, then given up.
"""

import hashlib
import re
from contextlib import closing
from pathlib import Path

from llmrun.errors import DownloadError
from llmrun.store.disk import BLOCK_BYTES, Disk
from llmrun.store.model import FileRecord
from llmrun.store.progress import Progress
from llmrun.store.reference import Reference
from llmrun.store.request import ConnectionLostError, Hub, Patience, Response, get
from llmrun.store.source import WantedFile

MAX_ETAG = 256
TRIES_OF_WRONG_BYTES = 2
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class Digest:
    """The hashes of a growing file: its sha256, and its git blob id if only that is known."""

    def __init__(self, wanted: WantedFile) -> None:
        self._wanted = wanted
        self._sha256 = hashlib.sha256()
        self._blob = hashlib.sha1(b"blob %d\0" % wanted.size, usedforsecurity=False)
        self.size = 0

    def update(self, block: bytes) -> None:
        """Take the next bytes."""
        self.size += len(block)
        self._sha256.update(block)
        if self._wanted.sha256 is None:
            self._blob.update(block)

    def matches(self) -> bool:
        """Whether the bytes so far are the wanted file."""
        if self.size != self._wanted.size:
            return False
        if self._wanted.sha256 is not None:
            return self._sha256.hexdigest() == self._wanted.sha256
        return self._blob.hexdigest() == self._wanted.blob_id

    def record(self) -> FileRecord:
        """The finished file's record, with its own sha256."""
        return FileRecord(self._wanted.path, self.size, self._sha256.hexdigest())


class Partial:
    """A growing file ``<name>.part``, its hashes, and the etag of the object it is part of."""

    def __init__(self, disk: Disk, folder: Path, wanted: WantedFile) -> None:
        self._disk = disk
        self._wanted = wanted
        self.path = folder / f"{wanted.path}.part"
        self._etag_path = folder / f"{wanted.path}.etag"
        self.digest = Digest(wanted)
        self.etag = self._known_etag()
        if self.etag and self.path.is_file() and self.path.stat().st_size <= wanted.size:
            self._file = disk.reopen(self.path)
            while block := self._file.read(BLOCK_BYTES):
                self.digest.update(block)
        else:
            disk.remove_file(self.path)
            self._file = disk.create(self.path)

    def append(self, block: bytes) -> None:
        """Write the next bytes."""
        self._disk.write(self._file, block)
        self.digest.update(block)

    def restart(self, etag: str | None = None) -> None:
        """Throw the bytes away and begin with the object that has ``etag``, if it has a strong one.

        The bytes go before the new etag is noted: a kill in between must not join two objects.
        """
        self._file.seek(0)
        self._file.truncate()
        self._disk.sync(self._file)
        self.digest = Digest(self._wanted)
        self.etag = etag
        self._disk.remove_file(self._etag_path)
        if etag:
            with self._disk.create(self._etag_path) as file:
                self._disk.write(file, etag.encode())

    def close(self) -> None:
        """Close the file; its bytes stay for another try."""
        self._file.close()

    def finish(self, final: Path) -> FileRecord:
        """Make the bytes durable and give the file its name."""
        self._disk.sync(self._file)
        self._file.close()
        self._disk.remove_file(self._etag_path)
        self._disk.replace(self.path, final)
        return self.digest.record()

    def drop(self) -> None:
        """Delete the bytes."""
        self._file.close()
        self._disk.remove_file(self._etag_path)
        self._disk.remove_file(self.path)

    def _known_etag(self) -> str | None:
        try:
            with self._etag_path.open("rb") as file:
                return _strong(file.read(MAX_ETAG + 1).decode("ascii"))
        except (OSError, UnicodeDecodeError):
            return None


def read_small(
    hub: Hub, url: str, limit: int, reference: Reference, wanted: WantedFile | None = None
) -> bytes:
    """The body of ``url``, at most ``limit`` bytes, and exactly ``wanted`` if that is given."""
    patience = Patience(hub, reference)
    while True:
        try:
            with get(hub, url, reference) as response:
                body = bytearray()
                for block in response.iter_raw():
                    body += block
                    if len(body) > limit:
                        raise DownloadError(
                            f"The hub's answer about {reference.name} exceeds {limit:,} bytes.",
                            "Check HF_ENDPOINT.",
                        )
            digest = Digest(wanted) if wanted else None
            if digest:
                digest.update(bytes(body))
                if not digest.matches():
                    raise ConnectionLostError("the hub sent other bytes than it announced")
            if not body:
                raise ConnectionLostError("the hub sent an empty answer")
            return bytes(body)
        except ConnectionLostError as err:
            patience.failed(err)


def download_file(
    hub: Hub,
    url: str,
    wanted: WantedFile,
    folder: Path,
    reference: Reference,
    progress: Progress,
    disk: Disk,
) -> FileRecord:
    """Bring ``wanted`` into ``folder`` under its name, continuing what is there.

    DownloadError once the patience of the settings is used up or the bytes are wrong twice.
    """
    final = folder / wanted.path
    record = _verified(final, wanted)
    if record:
        progress.advance(record.size)
        return record
    disk.remove_file(final)
    with closing(Partial(disk, folder, wanted)) as partial:
        progress.advance(partial.digest.size)
        for _ in range(TRIES_OF_WRONG_BYTES):
            _complete(hub, url, wanted, partial, reference, progress)
            if partial.digest.matches():
                return partial.finish(final)
            progress.advance(-partial.digest.size)
            partial.restart()
        partial.drop()
    raise DownloadError(
        f"{wanted.path} of {reference.name} arrived twice with the right length and wrong bytes.",
        "Check HF_ENDPOINT, proxy and disk, then run the command again.",
    )


def _complete(
    hub: Hub,
    url: str,
    wanted: WantedFile,
    partial: Partial,
    reference: Reference,
    progress: Progress,
) -> None:
    """Request the missing bytes until all are here; only bytes never seen before earn patience."""
    patience = Patience(hub, reference)
    most_bytes = partial.digest.size
    while partial.digest.size < wanted.size:
        try:
            _continue(hub, url, wanted, partial, reference, progress)
        except ConnectionLostError as err:
            if partial.digest.size > most_bytes:
                most_bytes = partial.digest.size
                patience.gained()
            patience.failed(err)


def _continue(
    hub: Hub,
    url: str,
    wanted: WantedFile,
    partial: Partial,
    reference: Reference,
    progress: Progress,
) -> None:
    """One request for what is missing. ConnectionLostError if it did not bring all of it."""
    headers = {}
    if partial.digest.size and partial.etag:
        headers = {"Range": f"bytes={partial.digest.size}-", "If-Range": partial.etag}
    with get(hub, url, reference, headers) as response:
        continues = response.status_code == 206 and _is_rest_of(response, partial, wanted)
        if not continues:
            progress.advance(-partial.digest.size)
            partial.restart(_strong(response.headers.get("etag", "")))
            if response.status_code != 200:
                partial.restart()
                raise ConnectionLostError(f"the hub answers {response.status_code} to a range")
        for block in response.iter_raw():
            if partial.digest.size + len(block) > wanted.size:
                progress.advance(-partial.digest.size)
                partial.restart()
                raise ConnectionLostError(f"{wanted.path} is longer than announced")
            partial.append(block)
            progress.advance(len(block))
    if partial.digest.size < wanted.size:
        raise ConnectionLostError(
            f"{wanted.path} ended at {partial.digest.size:,} of {wanted.size:,} bytes"
        )


def _is_rest_of(response: Response, partial: Partial, wanted: WantedFile) -> bool:
    """Whether a 206 answer is exactly what is missing, of the very same object."""
    found = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if not found or not partial.etag or response.headers.get("etag") != partial.etag:
        return False
    first, last, total = map(int, found.groups())
    return (first, last, total) == (partial.digest.size, wanted.size - 1, wanted.size)


def _strong(etag: str) -> str | None:
    """The etag if it promises equal bytes, else None."""
    is_strong = len(etag) > 2 and etag[0] == '"' == etag[-1] and len(etag) <= MAX_ETAG
    return etag if is_strong and etag.isprintable() and etag.isascii() else None


def _verified(path: Path, wanted: WantedFile) -> FileRecord | None:
    """The record of a file that is here already, after reading it; None if it is not as wanted."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != wanted.size:
        return None
    digest = Digest(wanted)
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.record() if digest.matches() else None
