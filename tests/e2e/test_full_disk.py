"""No space left: the named exit code, and nothing half-written stays."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def limited(home: dict[str, str], file_bytes: int, *arguments: str) -> Any:
    """Run with a limit on the size of any file, which makes writes fail as a full disk does."""
    code = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes}, {file_bytes}));"
        "sys.argv[0] = 'llmrun'; runpy.run_module('llmrun', run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, env=home, timeout=240
    )


def test_pull_on_a_full_disk(home: dict[str, str], hub: Any, tmp_path: Path) -> None:
    done = limited(home | {"HF_ENDPOINT": hub.endpoint}, 20_000_000, "pull", "acme/starter")
    assert done.returncode == 4, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    store = Path(home["LLMRUN_HOME"])
    assert not list(store.glob("models/*/*/config.json"))
    assert sum(p.stat().st_size for p in store.rglob("*") if p.is_file()) < 25_000_000


def test_quantize_on_a_full_disk(
    home: dict[str, str], starter_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = limited(home, 20_000_000, "quantize", str(starter_folder), "-q", "int8", "-o", str(out))
    assert done.returncode == 1, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
