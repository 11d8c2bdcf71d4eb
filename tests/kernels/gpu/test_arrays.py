"""What a step puts on the device, and when the host may write the next one over it."""

from typing import Any

import pytest
import torch

from llmrun.kernels.gpu import arrays
from llmrun.kernels.gpu.arrays import GpuStep
from llmrun.kernels.ops import Span

CARD = torch.device("cuda", 1)


def test_rows_behind_those_asked_for_are_rows_that_there_are() -> None:
    step = GpuStep(8, torch.device("cpu"))
    step.set([5, 6, 7, 8, 9], [Span(0, 0, 5, 0)], [2, 3, 4])
    assert step.rows[:4].tolist() == [2, 3, 4, 0]
    step.set([5], [Span(0, 0, 1, 5)], [0])
    assert step.rows.tolist() == [0] * len(step.rows)
    assert step.slots.tolist() == [0] + [-1] * (len(step.slots) - 1)


def test_the_host_waits_for_the_upload_before_and_for_nothing_else(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.stands_in(monkeypatch, arrays)
    step = GpuStep(8, CARD)
    done: list[str] = []
    cuda.checked = True
    step.set([5], [Span(0, 0, 1, 0)], [0])
    cuda.work("layers", do=lambda: done.append(f"layers of {int(step.ids[0])}"), on=CARD)
    step.set([6], [Span(0, 0, 1, 1)], [0])
    assert int(step.ids[0]) == 5  # the second upload is under way
    assert done == []
    cuda.current_stream(CARD).finish()
    assert done == ["layers of 5"]
    assert int(step.ids[0]) == 6
    assert int(step.positions[0]) == 1


def test_uploads_go_to_the_steps_own_card(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.stands_in(monkeypatch, arrays)
    step = GpuStep(8, CARD)
    step.set([5], [Span(0, 0, 1, 0)], [0])
    assert cuda.log[-2:] == ["copy [cuda:1 main]", "record [cuda:1 main]"]
