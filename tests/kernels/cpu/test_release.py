"""Weights of models that pass through layer by layer: laid apart, and given back."""

import gc
import weakref

import pytest
import torch

from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.weights import CpuWeight
from llmrun.kernels.forms import Dense
from llmrun.kernels.ops import Linear
from llmrun.kernels.reference.arrays import as_tensor, to_host

pytestmark = pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))


def product(backend: CpuBackend, weight: CpuWeight, x: torch.Tensor) -> torch.Tensor:
    """x W^T by the backend."""
    inputs, outputs = backend.empty(tuple(x.shape)), backend.empty((len(x), weight.shape[0]))
    backend.load(inputs, to_host(x))
    backend.load(outputs, to_host(torch.zeros(outputs.shape)))
    step = backend.step(len(x))
    step.set([0] * len(x), [], [])
    backend.linear_add(step, inputs, Linear(weight), None, outputs)
    return as_tensor(backend.to_host(outputs, len(x))).clone()


def test_weights_from_before_a_release_can_be_used_and_are_given_back() -> None:
    backend = CpuBackend(1)
    x, one, other = torch.randn(3, 64), torch.randn(48, 64), torch.randn(32, 64)
    first = backend.weight(Dense(to_host(one)))
    backend.release()
    second = backend.weight(Dense(to_host(other)))
    torch.testing.assert_close(product(backend, first, x), x @ one.t())
    torch.testing.assert_close(product(backend, second, x), x @ other.t())
    memory = weakref.ref(first.memory)
    assert memory() is not second.memory
    del first
    gc.collect()
    assert memory() is None


def test_host_values_are_written_into_the_first_rows() -> None:
    backend = CpuBackend(1)
    array = backend.empty((5, 3))
    backend.load(array, to_host(torch.ones(5, 3)))
    values = torch.arange(6.0).reshape(2, 3)
    backend.load(array, to_host(values))
    assert torch.equal(as_tensor(backend.to_host(array, 5))[:2], values)
    assert torch.equal(as_tensor(backend.to_host(array, 5))[2:], torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"size|structure"):
        backend.load(array, to_host(torch.zeros(6, 3)))
