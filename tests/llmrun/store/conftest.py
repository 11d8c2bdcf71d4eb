"""Fixtures of the store's tests: a hub on loopback, small repositories, wheels, no sockets."""

import hashlib
import json
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmrun.store.catalog import Catalog, parse
from llmrun.store.fetch import FetchSettings
from llmrun.store.reference import Reference, resolve
from llmrun.store.store import Store

Hub = Any  # a HubServer; its module is loaded by path
MakeFault = Any  # its Fault
WEIGHTS = bytes(range(256)) * 1200
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "README.md": b"# not needed",
    "modeling_tiny.py": b"raise SystemExit('code was run')",
    "pytorch_model.bin": b"a pickle",
}
TAKEN = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


@pytest.fixture
def fault(hub_module: ModuleType) -> MakeFault:
    """The Fault class of the hub server."""
    return hub_module.Fault


@pytest.fixture
def hub_server(hub_module: ModuleType) -> Iterator[Any]:
    """A running hub without repositories."""
    with hub_module.HubServer() as server:
        yield server


@pytest.fixture
def tiny_repo(hub_server: Hub) -> str:
    """The repository org/tiny on the hub; returns its commit."""
    commit: str = hub_server.add("org/tiny", dict(FILES))
    return commit


@pytest.fixture
def weights() -> bytes:
    """The bytes of org/tiny's model.safetensors."""
    return WEIGHTS


@pytest.fixture
def taken() -> set[str]:
    """The files of org/tiny that are to be downloaded."""
    return set(TAKEN)


@pytest.fixture
def settings(hub_server: Hub) -> FetchSettings:
    """Settings for the hub on loopback, without pauses between tries."""
    return FetchSettings(endpoint=hub_server.endpoint, backoff_s=0.0, timeout_s=10.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def catalog() -> Catalog:
    """A catalog with one hub entry and one package entry."""
    return parse(
        {
            "default": "tiny",
            "models": {"tiny": hub_table("a" * 40), "tiny-wheel": wheel_table(b"x", b"y")},
        },
        "models.toml",
    )


@pytest.fixture
def reference(catalog: Catalog) -> Callable[..., Reference]:
    """Resolve a name against the small catalog."""
    return lambda name, revision=None: resolve(name, catalog, revision)


@pytest.fixture
def tables() -> dict[str, Callable[..., dict[str, Any]]]:
    """Makers of catalog tables: ``hub(revision)`` and ``wheel(wheel_bytes, member_bytes)``."""
    return {"hub": hub_table, "wheel": wheel_table}


@pytest.fixture
def make_wheel() -> Callable[..., bytes]:
    """Write a small wheel with the given members; returns its bytes."""

    def make(path: Path, members: dict[str, bytes]) -> bytes:
        info = "tiny_model-1.0.dist-info"
        meta = {
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        files = {**members, **meta}
        record = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
                archive.writestr(name, data)
        return path.read_bytes()

    return make


@pytest.fixture
def no_sockets_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, make every new socket an error."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    def block() -> None:
        for name in ("socket", "create_connection", "getaddrinfo"):
            monkeypatch.setattr(socket, name, refuse)

    return block


@pytest.fixture
def no_sockets(no_sockets_later: Callable[[], None], hub_server: Hub) -> None:
    """Make every new socket an error, once the hub listens."""
    no_sockets_later()


@pytest.fixture
def hidden_state() -> Callable[[Store], list[str]]:
    """What a store holds besides published folders: names below staging/."""
    return lambda store: sorted(p.name for p in store.staging.glob("*"))


@pytest.fixture
def read_manifest() -> Callable[[Path], dict[str, Any]]:
    """The parsed manifest.json of a folder."""

    def read(folder: Path) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        return document

    return read


def hub_table(revision: str, repo: str = "org/tiny", **more: object) -> dict[str, Any]:
    """A catalog table of a hub model."""
    return {**_common("hub"), "repo": repo, "revision": revision, **more}


def wheel_table(wheel: bytes, member: bytes) -> dict[str, Any]:
    """A catalog table of a model in the wheel ``tiny-model`` 1.0."""
    return {
        **_common("pypi"),
        "package": "tiny-model",
        "version": "1.0",
        "wheel": "tiny_model-1.0-py3-none-any.whl",
        "wheel_sha256": hashlib.sha256(wheel).hexdigest(),
        "wheel_size": len(wheel),
        "member": "tiny_model/tiny.gguf",
        "member_sha256": hashlib.sha256(member).hexdigest(),
        "member_size": len(member),
    }


def _common(source: str) -> dict[str, Any]:
    return {
        "source": source,
        "name": "Tiny",
        "license": "Apache-2.0",
        "architecture": "llama",
        "parameters": 1000,
        "context": 128,
        "quant": "int8",
        "memory_bytes": 4000,
    }
