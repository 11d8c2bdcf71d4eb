"""Whole commands as a user types them, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose store, config and history lie in a fresh folder."""
    return os.environ | {
        "HOME": str(tmp_path / "home"),
        "LLMRUN_HOME": str(tmp_path / "store"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


@pytest.fixture
def llmrun(home: dict[str, str], tmp_path: Path) -> Run:
    """Run a command to its end; ``stdin`` is bytes, stdout and stderr are kept apart."""

    def run(
        *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "llmrun", *arguments],
            input=stdin,
            capture_output=True,
            env=home | (env or {}),
            cwd=tmp_path,
            timeout=240,
        )

    return run


@pytest.fixture(scope="session")
def hub(hub_module: ModuleType, starter_folder: Path) -> Iterator[Any]:
    """A loopback hub that serves the starter as ``acme/starter``, cut in two shards."""
    from safetensors import safe_open
    from safetensors.torch import save

    files = {p.name: p.read_bytes() for p in starter_folder.iterdir() if p.suffix != ".safetensors"}
    shards: list[dict[str, Any]] = [{}, {}]
    with safe_open(starter_folder / "model.safetensors", "pt") as opened:
        names = sorted(opened.keys())
        for number, name in enumerate(names):
            shards[2 * number // len(names)][name] = opened.get_tensor(name)
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        files[file] = save(shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["pytorch_model.bin"] = b"a pickle nobody may fetch"
    files["modeling.py"] = b"raise SystemExit('code was run')"
    with hub_module.HubServer() as server:
        server.add("acme/starter", files)
        yield server
