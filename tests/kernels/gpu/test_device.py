"""The CUDA device, on a stand-in for ``torch.cuda`` that notes calls and the stream they are on."""

import contextlib
import gc
import threading
from typing import Any

import pytest
import torch

from llmrun.errors import InternalError
from llmrun.kernels.gpu import device as module
from llmrun.kernels.gpu.device import CudaDevice, current

CARD = torch.device("cuda", 1)


@pytest.fixture
def cuda(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    cuda.stands_in(monkeypatch, module)
    return cuda


def test_work_is_captured_beside_the_current_stream_of_its_card(cuda: Any) -> None:
    device = CudaDevice(CARD)
    replay = device.capture([lambda: cuda.work("launch")])
    assert cuda.log == [
        "cuda:1 side waits for cuda:1 main",
        "begin [cuda:1 side]",
        "launch [cuda:1 side]",
        "end [cuda:1 side]",
        "cuda:1 main waits for cuda:1 side",
    ]
    assert cuda.options == {"capture_error_mode": "thread_local"}
    cuda.log.clear()
    replay()
    device.warm_up([lambda: cuda.work("launch")])
    event = device.event()
    event.record()
    event.wait()
    assert cuda.log == [
        "replay [cuda:1 main]",
        "cuda:1 side waits for cuda:1 main",
        "launch [cuda:1 side]",
        "cuda:1 main waits for cuda:1 side",
        "record [cuda:1 main]",
        "wait [cuda:0 main]",  # which is the caller's: it is left as it was
    ]


def test_any_thread_works_on_its_card(cuda: Any) -> None:
    device = CudaDevice(CARD)
    seen: list[str] = []

    def work() -> None:
        seen.append(str(cuda.current))
        device.warm_up([lambda: cuda.work("launch")])
        device.capture([lambda: cuda.work("launch")])()
        with current(CARD):
            seen.append(str(cuda.current))
        seen.append(str(cuda.current))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["cuda:0", "cuda:1", "cuda:0"]
    assert "replay [cuda:1 main]" in cuda.log
    assert not any("cuda:0" in line for line in cuda.log)


def test_no_device_is_made_current_for_the_cpu(cuda: Any) -> None:
    with current(torch.device("cpu")):
        assert cuda.current == torch.device("cuda", 0)


# --- the pool of the graphs -------------------------------------------------------------------
def test_graphs_share_a_pool(cuda: Any) -> None:
    device = CudaDevice(CARD)
    replays = [device.capture([lambda: cuda.work("launch")]) for _ in range(3)]
    assert list(cuda.uses.values()) == [3]
    del replays[0]
    replays.append(device.capture([lambda: cuda.work("launch")]))
    assert list(cuda.uses.values()) == [3]


def test_after_the_last_graph_is_gone_another_is_captured(cuda: Any) -> None:
    device = CudaDevice(CARD)
    for _ in range(2):  # a conversation, whose graphs die with its cache
        replays = [device.capture([lambda: cuda.work("launch")]) for _ in range(2)]
        replays[0]()
        replays.clear()
    assert list(cuda.uses.values()) == [0, 0]


def test_after_a_capture_that_failed_another_is_captured(cuda: Any) -> None:
    def fail() -> None:
        raise RuntimeError("operation not permitted")

    device = CudaDevice(CARD)
    with contextlib.suppress(InternalError):
        device.capture([fail])
    device.capture([lambda: cuda.work("launch")])()
    assert "replay [cuda:1 main]" in cuda.log


# --- captures that go wrong -------------------------------------------------------------------
def test_nothing_is_collected_while_it_captures(cuda: Any) -> None:
    seen: list[bool] = []
    CudaDevice(CARD).capture([lambda: seen.append(gc.isenabled())])
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), InternalError),
        (torch.cuda.OutOfMemoryError("out"), torch.cuda.OutOfMemoryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_capture_that_fails_is_ended_and_reported(
    cuda: Any, raised: BaseException, expected: type[BaseException]
) -> None:
    def fail() -> None:
        raise raised

    with pytest.raises(expected):
        CudaDevice(CARD).capture([fail])
    assert cuda.log == [
        "cuda:1 side waits for cuda:1 main",
        "begin [cuda:1 side]",
        "end [cuda:1 side]",
        "cuda:1 main waits for cuda:1 side",
    ]
    assert gc.isenabled()
