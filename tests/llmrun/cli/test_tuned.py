"""Measured launches on their way from the file to the backend."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrun.cli import tuned
from llmrun.errors import UsageError


def test_other_backends_are_left_alone(tmp_path: Path) -> None:
    backend: Any = SimpleNamespace(name="cpu")
    settings: Any = SimpleNamespace(store_root=tmp_path)
    assert tuned.use(backend, settings) is None
    assert vars(backend) == {"name": "cpu"}


@pytest.mark.slow
def test_a_gpu_backend_gets_what_was_measured_on_cards_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmrun.kernels.gpu import tuned_file
    from llmrun.kernels.gpu.backend import GpuBackend
    from llmrun.kernels.gpu.heuristics import Launch, Shape

    monkeypatch.setattr(tuned_file, "card_name", lambda device: f"Card of {device}")
    settings: Any = SimpleNamespace(store_root=tmp_path)
    backend: Any = GpuBackend("cpu")
    assert tuned.use(backend, settings) is None
    assert backend.tuned == {}
    found = {(90, Shape("w4", 128, 4096, 4096)): Launch(4, (5, 4, 3), 4)}
    path = tuned.keep(settings, "cpu", found)
    assert path == tmp_path / "tuning" / "card-of-cpu.json"
    said = tuned.use(backend, settings)
    assert said == f"linears launched as measured on this card ({path})"
    assert backend.tuned == found
    path.write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        tuned.use(backend, settings)
