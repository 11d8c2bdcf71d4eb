"""Seconds per call: many calls recorded as one CUDA graph, replayed and timed by events.

A launch costs the host more than most kernels take, so they are never timed one by one. Streams,
events and graphs are the current device's: whoever times work makes its device the current one.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch

REPEATS = 3
REPLAY_S = 0.01
"""Each repeat replays the graph for at least this long."""

MOST_REPLAYS = 1000

Call = Callable[[], object]


def per_call(calls: Sequence[Call], *, graph: bool = True) -> float:
    """Seconds of one of the calls, which run in turn on the current device; the median counts.

    ``graph`` False: as a stream of launches, for long calls, or some that a graph cannot hold.
    """
    replay = recorded(calls) if graph else lambda: _run(calls)
    replay()
    count = max(1, min(MOST_REPLAYS, int(REPLAY_S / _seconds(replay, 1)) + 1))
    return median(_seconds(replay, count) for _ in range(REPEATS)) / len(calls)


def recorded(calls: Sequence[Call]) -> Call:
    """The calls as one graph, after each ran once outside of it; returns its replay."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        _run(calls)
        side.synchronize()
        graph.capture_begin()  # torch.cuda.graph() would collect garbage each time
        _run(calls)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph.replay


def _seconds(replay: Call, count: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        replay()
    stop.record()
    stop.synchronize()
    return float(max(start.elapsed_time(stop) / 1e3 / count, 1e-7))


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
