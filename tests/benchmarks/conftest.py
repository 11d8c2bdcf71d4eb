"""The benchmarks' modules, which lie beside the product and import one another by plain names."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import one of them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
