"""Norms, routing and noise on the host."""

import numpy as np
import pytest
import torch

from llmrun.kernels.host import HostArray
from llmrun.kernels.ops import Norm
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.kernels.reference.norms import normed as reference
from llmrun.quant.activations import first_bad, noisy, normed, routed, taken
from llmrun.quant.arrays import floats


def host(*shape: int, seed: int = 0) -> HostArray:
    return to_host(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("beta", [None, host(64, seed=2)])
def test_norms_are_those_of_the_ops(centered: bool, beta: HostArray | None) -> None:
    x, gamma = host(9, 64), host(64, seed=1)
    got = normed(x, gamma, beta, eps=1e-5, offset=1.0, centered=centered)
    added = None if beta is None else as_tensor(beta)
    norm = Norm(as_tensor(gamma), 1e-5, 1.0, centered, added)
    torch.testing.assert_close(as_tensor(got), reference(as_tensor(x), norm))


def test_rows_are_routed_to_the_experts_that_score_highest() -> None:
    scores = host(50, 6)
    chosen = torch.topk(as_tensor(scores), 2).indices
    wanted = [torch.nonzero((chosen == expert).any(-1)).flatten().tolist() for expert in range(6)]
    assert routed(scores, 2) == wanted
    assert floats(taken(scores, [4, 0])).tolist() == floats(scores)[[4, 0]].tolist()


def test_noise_is_relative_and_the_same_for_a_seed() -> None:
    x = host(40, 64)
    first, again, other = (noisy(x, 2**-9, seed) for seed in ((1, 2), (1, 2), (1, 3)))
    assert bytes(first.data) == bytes(again.data) != bytes(other.data)
    change = floats(first) / floats(x) - 1
    assert 0.98 * 2**-9 < np.abs(change).max() <= 2**-9 * 1.001
    assert np.abs(change.mean()) < 2**-9 / 10


def test_the_first_value_that_is_not_finite_is_found() -> None:
    x = host(3, 5)
    assert first_bad(x) is None
    floats(x)[1, 4] = np.nan
    floats(x)[2, 0] = np.inf
    assert first_bad(x) == (1, 4)
