"""A reference backend on the CPU, shared by the op tests."""

import pytest

from llmrun.kernels import dispatch
from llmrun.kernels.ops import Backend


@pytest.fixture(scope="session")
def backend() -> Backend:
    return dispatch.bind("cpu", threads=1)
