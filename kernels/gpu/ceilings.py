"""What a GPU can do at best, measured: reading its memory, multiplying matrices."""

import time
from collections.abc import Callable

import torch

from llmrun.kernels.gpu.device import current

READ_BYTES = 4 << 30
"""Far more than any cache holds."""

SIZE = 8192
REPEATS = 5
HOST_SHARE = 64
"""In the interpreter these run on the host: that much smaller."""


def bandwidth(device: torch.device) -> float:
    """Bytes per second of summing a large buffer."""
    nbytes = READ_BYTES if device.type == "cuda" else READ_BYTES // HOST_SHARE
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        nbytes = min(nbytes, free // 2)
    with current(device):
        words = torch.zeros(nbytes // 4, dtype=torch.int32, device=device)
        rate = words.nbytes / _best_seconds(words.sum, device)
        del words
    if device.type == "cuda":
        torch.cuda.empty_cache()  # other libraries must find this memory
    return rate


def flops(device: torch.device) -> float:
    """FLOP per second of a bf16 product of square matrices."""
    size = SIZE if device.type == "cuda" else SIZE // HOST_SHARE
    with current(device):
        a = torch.randn(size, size, device=device).bfloat16()
        out = torch.empty_like(a)
        return 2.0 * size**3 / _best_seconds(lambda: torch.mm(a, a, out=out), device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of work on a device, which is the current one: events are recorded where they measure."""
    work()
    return min(_seconds(work, device) for _ in range(REPEATS))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start_event.record()
    work()
    end_event.record()
    end_event.synchronize()
    elapsed_ms: float = start_event.elapsed_time(end_event)
    return elapsed_ms / 1e3
