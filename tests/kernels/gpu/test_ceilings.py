"""The ceilings of a card that is not the first: work and clock on the same one."""

from typing import Any

import pytest
import torch

from llmrun.kernels.gpu import ceilings, device

CARD = torch.device("cuda", 1)


@pytest.fixture
def cuda(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    cuda.stands_in(monkeypatch, ceilings, device)
    monkeypatch.setattr(ceilings, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "SIZE", 64)
    return cuda


def test_bandwidth_is_timed_where_the_buffer_lies(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def total(words: torch.Tensor) -> None:
        cuda.work("sum", 0.5, on=words.device)

    monkeypatch.setattr(type(ceilings.torch.zeros(1, device=CARD)), "sum", total, raising=False)
    assert ceilings.bandwidth(CARD) == pytest.approx((1 << 20) / 0.5e-3)
    assert cuda.log.count("sum [cuda:1 main]") == 1 + ceilings.REPEATS
    assert cuda.current == torch.device("cuda", 0)


def test_flops_are_timed_where_the_matrices_lie(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        cuda.work("mm", 0.25, on=CARD)

    monkeypatch.setattr(ceilings.torch, "mm", product, raising=False)
    assert ceilings.flops(CARD) == pytest.approx(2 * 64**3 / 0.25e-3)
    assert cuda.log.count("mm [cuda:1 main]") == 1 + ceilings.REPEATS
    assert cuda.current == torch.device("cuda", 0)
