"""Measured launches of the GPU kernels: where they are kept, and how a backend gets them."""

from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.cli.settings import Settings
from llmrun.kernels.ops import Backend

if TYPE_CHECKING:
    from llmrun.kernels.gpu.heuristics import Tuned

FOLDER = "tuning"


def use(backend: Backend, settings: Settings) -> str | None:
    """Give a GPU backend what was measured on its card; a line about it, None if nothing was.

    UsageError for a file that cannot be read.
    """
    if backend.name != "gpu":
        return None
    from llmrun.kernels.gpu.backend import GpuBackend
    from llmrun.kernels.gpu.tuned_file import read

    assert isinstance(backend, GpuBackend)
    path = file_of(settings, backend.device)
    backend.tuned = read(path)
    return f"linears launched as measured on this card ({path})" if backend.tuned else None


def keep(settings: Settings, device: str, found: "Tuned") -> Path:
    """Keep what was found on a device beside what its file has; returns the file."""
    from llmrun.kernels.gpu.tuned_file import card_name, write

    path = file_of(settings, device)
    write(path, card_name(device), found)
    return path


def forget(settings: Settings, device: str) -> str:
    """Remove what was measured on cards like this; a line about it."""
    path = file_of(settings, device)
    there = path.exists()
    path.unlink(missing_ok=True)
    return f"removed {path}" if there else "nothing was measured on this card"


def file_of(settings: Settings, device: str) -> Path:
    """The file for cards like this one."""
    from llmrun.kernels.gpu.tuned_file import card_name, path_in

    return path_in(settings.store_root / FOLDER, card_name(device))
