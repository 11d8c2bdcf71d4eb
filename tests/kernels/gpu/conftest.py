"""A stand-in for CUDA with two cards: what it is asked, in which order, on which card."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

Work = Callable[[], object]


class FakeCuda:
    """As much of ``torch.cuda`` as the GPU backend uses, with the rules that a real one has.

    Each thread has a current device, the first until it is told. A stream belongs to the device
    that was current when it was made, an event to the one it was recorded on. Work goes to the
    current stream of a device and is done when somebody waits for it; streams have clocks of their
    own. A pool lives as long as graphs refer to it, and a dead one takes no captures.
    """

    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __init__(self) -> None:
        self.log: list[str] = []
        self.uses: dict[object, int] = {}
        """Of each pool that ever was: graphs that refer to it."""
        self.options: dict[str, object] = {}
        """Of the last capture, but for its pool."""
        self.checked = False
        """Whether waiting for a whole stream is an error (``set_sync_debug_mode``)."""
        self._thread = threading.local()
        self._captures: dict[str, list[tuple[str, float, Work]]] = {}
        self.Stream, self.Event, self.CUDAGraph = _stream(self), _event(self), _graph(self)

    # --- what the product calls ------------------------------------------------------------
    @property
    def current(self) -> torch.device:
        """The current device of this thread."""
        return getattr(self._thread, "device", torch.device("cuda", 0))

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self.current
        self._thread.device = before if device.index is None else device
        try:
            yield
        finally:
            self._thread.device = before

    def current_stream(self, device: torch.device | None = None) -> Any:
        device = self.current if device is None or device.index is None else device
        streams = self._streams()
        if device not in streams:
            with self.device(device):
                streams[device] = self.Stream("main")
        return streams[device]

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        with self.device(stream.device):
            before = self.current_stream()
            self._streams()[stream.device] = stream
            try:
                yield
            finally:
                self._streams()[stream.device] = before

    def synchronize(self) -> None:
        self.current_stream().finish()

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 8 << 30, 16 << 30

    def empty_cache(self) -> None:
        self.note("empty cache")

    # --- what tests call ----------------------------------------------------------------------
    def note(self, what: str) -> None:
        """Note what is done, with the current stream."""
        self.log.append(f"{what} [{self.current_stream()}]")

    def work(
        self,
        what: str,
        ms: float = 1.0,
        do: Work = lambda: None,
        on: torch.device | None = None,
    ) -> None:
        """Issue work on the current stream of a device, of the current one if none is given."""
        stream = self.current_stream(on)
        self.log.append(f"{what} [{stream}]")
        capture = self._captures.get(str(stream))
        if capture is None:
            stream.issue(ms, do)
        else:
            capture.append((what, ms, do))

    def stands_in(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Be ``torch.cuda`` for modules; what they make on a card lies on the host."""
        for module in modules:
            monkeypatch.setattr(module, "torch", _Torch(self))

    def placed(self, tensor: torch.Tensor, card: torch.device | None) -> torch.Tensor:
        """A tensor that says it lies on a card."""
        held = tensor.as_subclass(OnCard)
        held.cuda, held.card = self, card
        return held

    def _streams(self) -> dict[torch.device, Any]:
        if not hasattr(self._thread, "streams"):
            self._thread.streams = {}
        streams: dict[torch.device, Any] = self._thread.streams
        return streams


def _stream(cuda: FakeCuda) -> type:
    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.device, self.name = cuda.current, name
            self.ms = 0.0
            self.pending: list[Work] = []

        def __str__(self) -> str:
            return f"{self.device} {self.name}"

        def issue(self, ms: float, do: Work) -> None:
            self.ms += ms
            self.pending.append(do)

        def wait_stream(self, other: "Stream") -> None:
            cuda.log.append(f"{self} waits for {other}")
            self.ms = max(self.ms, other.ms)

        def synchronize(self) -> None:
            if cuda.checked:
                raise RuntimeError("called a synchronizing CUDA operation")
            self.finish()

        def finish(self, count: int | None = None) -> None:
            for do in self.pending[:count]:
                do()
            del self.pending[:count]

    return Stream


def _event(cuda: FakeCuda) -> type:
    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.timing = enable_timing
            self.stream: Any = None
            self.behind: list[Work] = []

        def record(self, stream: Any = None) -> None:
            stream = stream or cuda.current_stream()
            if self.stream is not None and stream.device != self.stream.device:
                raise RuntimeError("an event is recorded on one device only")
            cuda.log.append(f"record [{stream}]")
            self.stream, self.ms, self.behind = stream, stream.ms, list(stream.pending)

        def synchronize(self) -> None:
            cuda.note("wait")
            for do in self.behind:
                if do in self.stream.pending:
                    self.stream.pending.remove(do)
                    do()

        def elapsed_time(self, end: "Event") -> float:
            assert self.timing
            assert end.timing
            if self.stream.device != end.stream.device:
                raise RuntimeError("both events must be of one device")
            return float(end.ms - self.ms)

    return Event


def _graph(cuda: FakeCuda) -> type:
    class CUDAGraph:
        def __init__(self) -> None:
            self.handle: object = None
            self.held: list[tuple[str, float, Work]] | None = None

        def capture_begin(self, pool: object = None, **options: object) -> None:
            if pool is not None and cuda.uses[pool] == 0:
                raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
            self.handle = len(cuda.uses) if pool is None else pool
            cuda.uses[self.handle] = cuda.uses.get(self.handle, 0) + 1
            cuda.options = options
            self.stream = cuda.current_stream()
            if self.stream.name == "main":
                raise RuntimeError("CUDA graphs must be captured on a non-default stream")
            cuda.note("begin")
            cuda._captures[str(self.stream)] = []

        def capture_end(self) -> None:
            cuda.note("end")
            self.held = cuda._captures.pop(str(cuda.current_stream()))

        def pool(self) -> object:
            assert self.held is not None
            return self.handle

        def replay(self) -> None:
            cuda.note("replay")
            assert self.held is not None
            assert self.stream.device == cuda.current
            for _, ms, do in self.held:
                cuda.current_stream().issue(ms, do)

        def __del__(self) -> None:
            if self.handle is not None:
                cuda.uses[self.handle] -= 1

    return CUDAGraph


class _Torch:
    """``torch`` itself, but for ``cuda`` and where tensors lie."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("zeros", "empty", "randn"):
            return found

        def made(*arguments: Any, device: torch.device | None = None, **options: Any) -> Any:
            return self.cuda.placed(found(*arguments, **options), device)

        return made


class OnCard(torch.Tensor):
    """A tensor on the host that says it lies on ``card``; None: in the host's memory."""

    cuda: FakeCuda
    card: torch.device | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.card or torch.device("cpu")

    def pin_memory(self, device: object = None) -> "OnCard":
        return self

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "OnCard":
        """What the source has when the card comes to it."""
        plain = self.as_subclass(torch.Tensor)
        self.cuda.work("copy", do=lambda: plain.copy_(source), on=self.card)
        return self


@pytest.fixture
def cuda() -> FakeCuda:
    """CUDA with two cards, for ``stands_in``."""
    return FakeCuda()
