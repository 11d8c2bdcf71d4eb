"""A reference backend on the CPU, shared by the op tests."""

import pytest

from llmrun.kernels.reference.backend import TorchBackend


@pytest.fixture(scope="session")
def backend() -> TorchBackend:
    return TorchBackend("cpu", 1)
