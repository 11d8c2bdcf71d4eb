"""The native backend on every instruction set of this machine, and ways in and out of arrays."""

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.library import library, problem

TINY = Path(__file__).parent / "tiny.py"
ISAS = ("base", "avx2", "avxvnni", "avx512", "amx")


def usable_isas() -> list[str]:
    """The instruction sets that can run here."""
    found = []
    for name in ISAS if problem() is None else ():
        context = library().llmr_create(1, name.encode())
        if context:
            library().llmr_destroy(context)
            found.append(name)
    return found


@pytest.fixture(scope="session")
def isas() -> list[str]:
    return usable_isas()


@pytest.fixture(params=usable_isas() or ["none"])
def isa(request: pytest.FixtureRequest) -> str:
    if reason := problem():
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def cpu(isa: str) -> CpuBackend:
    """Two threads of one instruction set."""
    return CpuBackend(2, isa=isa, huge_pages=False)


@pytest.fixture(scope="session")
def fill() -> Callable[[CpuArray, torch.Tensor], CpuArray]:
    """Copies values into the first rows of an array; the rest becomes NaN."""

    def copy(array: CpuArray, values: torch.Tensor) -> CpuArray:
        whole = torch.full((array.host(array.shape[0]).size,), float("nan"))
        whole[: values.numel()] = values.float().flatten()
        ctypes.memmove(array.address, whole.data_ptr(), 4 * len(whole))
        return array

    return copy


@pytest.fixture(scope="session")
def read() -> Callable[[CpuArray], torch.Tensor]:
    """A copy of an array's values."""

    def copy(array: CpuArray) -> torch.Tensor:
        host = array.host(array.shape[0])
        return torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(host.shape)

    return copy


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module of the tiny decoder."""
    spec = importlib.util.spec_from_file_location("llmrun_test_tiny", TINY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
