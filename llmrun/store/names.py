"""Which names are safe to become part of a path or a URL: our own check, the same on every OS.

Names come from users, from ``models.toml`` and from a hub; none of them is trusted. A name that
passes here cannot leave its folder, hit a device or be trimmed by a file system.
"""

import hashlib
import re

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
MOST_PARTS = 1_024
"""Of a split model; a name that claims more is the name of one file."""
MOST_FOLDERS = 4
# Windows opens these as devices whatever extension follows.
DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))]
)


def is_part(name: str) -> bool:
    """Whether ``name`` can be an alias or one half of ``org/name``."""
    return PART.fullmatch(name) is not None and _is_plain(name)


def is_repo(name: str) -> bool:
    """Whether ``name`` is a hub id: one or two parts."""
    parts = name.split("/")
    return len(parts) <= 2 and all(is_part(part) for part in parts)


def is_revision(name: str) -> bool:
    """Whether ``name`` can be a branch, tag or commit."""
    return REVISION.fullmatch(name) is not None and all(_is_plain(p) for p in name.split("/"))


def is_file(name: str) -> bool:
    """Whether ``name`` is a plain file name: no folder, device, stream or hidden end."""
    return FILE.fullmatch(name) is not None and _is_plain(name)


def is_file_in_folders(path: str) -> bool:
    """Whether ``path`` is a plain file name behind at most four plain folders."""
    parts = path.split("/")
    return len(parts) <= MOST_FOLDERS + 1 and all(is_file(part) for part in parts)


def is_commit(name: str) -> bool:
    """Whether ``name`` is a full commit: 40 lower-case hex digits."""
    return COMMIT.fullmatch(name) is not None


def is_sha256(digest: str) -> bool:
    """Whether ``digest`` is 64 lower-case hex digits."""
    return SHA256.fullmatch(digest) is not None


def leaves_folder(path: str) -> bool:
    """Whether a slash-separated path from a hub tries to point outside, on any OS."""
    if "\\" in path or re.match(r"[A-Za-z]:", path) or any(ord(c) < 32 for c in path):
        return True
    return any(part in ("", ".", "..") for part in path.split("/"))


def parts_of(name: str) -> list[str]:
    """The files of the model that the GGUF file ``name`` belongs to, in order: mostly it alone."""
    split = _split(name)
    if split is None:
        return [name]
    return [f"{split[1]}-{n:05}-of-{split[3]}.gguf" for n in range(1, int(split[3]) + 1)]


def first_part_of(name: str) -> str:
    """The first of ``parts_of``."""
    split = _split(name)
    return name if split is None else f"{split[1]}-00001-of-{split[3]}.gguf"


def slug(text: str) -> str:
    """A folder name for ``text``: readable, and unique through the hash of the exact text.

    Two names that a file system would fold together (case, ``a--b/c`` and ``a/b--c``) stay apart.
    """
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:64]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _split(name: str) -> re.Match[str] | None:
    split = SPLIT.fullmatch(name)
    return split if split and 1 <= int(split[2]) <= int(split[3]) <= MOST_PARTS else None


def _is_plain(name: str) -> bool:
    stem = name.split(".")[0].lower()
    return bool(name) and ".." not in name and name[-1] not in ". " and stem not in DEVICES
