"""A fake model with known delays, as a fixture."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.engine.sampler import Sampler
from llmrun.kernels.ops import Sampling

FakeModel = Any  # defined in fake.py


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("llmrun_test_fake", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module of the fake model."""
    return _load(Path(__file__).parent / "fake.py")


@pytest.fixture
def model(fake: ModuleType) -> FakeModel:
    return fake.make_model()


@pytest.fixture
def make_cache() -> Callable[..., KvCache]:
    def make(model: FakeModel, capacity: int = 32, n_slots: int = 2) -> KvCache:
        return KvCache(model.backend, model.spec, n_slots, capacity, "f32")

    return make


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(Sampling(), vocab=100)
