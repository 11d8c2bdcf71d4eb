"""What the decode loop asks of a device: captures, events, and copies that nobody waits for.

``CudaDevice`` is the real one. ``HostDevice`` has nothing to wait for: kernels that are interpreted
are done when their launch returns. Both are used from one thread at a time.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol
from weakref import WeakSet

import torch

from llmrun.errors import InternalError

Launch = Callable[[], object]
"""Issues some work on the current stream."""


class Event(Protocol):
    """A place in the work of the device."""

    def record(self) -> None:
        """Set it behind all work issued so far."""

    def wait(self) -> None:
        """Return when the device has come to it."""


class Device(Protocol):
    """One device and its current stream."""

    captures: bool
    """Whether ``capture`` is possible."""

    def warm_up(self, launches: Sequence[Launch]) -> None:
        """Issue launches as they will be captured, for real and in the order of the stream."""

    def capture(self, launches: Sequence[Launch]) -> Launch:
        """Record launches without running them; return what runs them all at once.

        Each must have been issued before, so that nothing is compiled, loaded or allocated.
        InternalError for a launch that cannot be recorded.
        """

    def event(self) -> Event:
        """A new event."""

    def on_host(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Host memory for ``count`` copies of a tensor."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy to host memory when the device gets there: read it behind an event."""


class CudaDevice:
    """A CUDA device. Captures are taken on a stream of its own, into a pool of memory they share.

    The threads that use it may have another current device.
    """

    captures = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def warm_up(self, launches: Sequence[Launch]) -> None:
        """On the stream that captures, so that what a stream keeps for itself is made too."""
        with self._beside():
            _issue(launches)

    def capture(self, launches: Sequence[Launch]) -> Launch:
        """Record launches as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with self._beside(), _without_collection():
            # Other threads may go on using the device meanwhile.
            # A pool dies with the last graph in it: only a graph that lives can name one.
            pool = next((other.pool() for other in self._graphs), None)
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                _issue(launches)
                graph.capture_end()
            except torch.cuda.OutOfMemoryError:
                _abandon(graph)
                raise
            except RuntimeError as error:
                _abandon(graph)
                raise InternalError(
                    f"a decode step could not be recorded as a CUDA graph: {error}",
                    "please report this with the output of `llmrun doctor`",
                ) from error
            except BaseException:
                _abandon(graph)
                raise
        self._graphs.add(graph)

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay

    def event(self) -> Event:
        """An event that is waited for without giving the processor away: the sooner known."""
        return _CudaEvent(self._device)

    def on_host(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.zeros(count, *like.shape, dtype=like.dtype).pin_memory()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy without waiting."""
        with torch.cuda.device(self._device):
            target.copy_(source, non_blocking=True)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the side stream, between what the current one has and what it will get."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            try:
                with torch.cuda.stream(self._side):
                    yield
            finally:
                current.wait_stream(self._side)


class _CudaEvent:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        with torch.cuda.device(self._device):
            self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class HostDevice:
    """A device whose work is done when it is issued. It cannot capture."""

    captures = False

    def warm_up(self, launches: Sequence[Launch]) -> None:
        """Run them."""
        _issue(launches)

    def capture(self, launches: Sequence[Launch]) -> Launch:
        """Refused with InternalError."""
        raise InternalError("interpreted kernels cannot be recorded", "run them one by one")

    def event(self) -> Event:
        """An event that is always past."""
        return _Past()

    def on_host(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Plain memory."""
        return torch.zeros(count, *like.shape, dtype=like.dtype)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)


class _Past:
    def record(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        """Nothing is under way."""


def device_of(device: torch.device) -> Device:
    """The device a backend works on."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Meanwhile a device is the current one of this thread, as kernels, events and streams need it.

    Each thread has its own, the first device until it is told; for the CPU nothing changes.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _issue(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    with contextlib.suppress(RuntimeError):  # the capture is broken, which is being reported
        graph.capture_end()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    # A collection may free device memory, which breaks the capture it falls into.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
