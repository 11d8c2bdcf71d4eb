"""Cold TTFT: from the start of the process to the first id, as a waterfall of stages.

The caller stamps the end of each stage it goes through (imports, opening files, loading); the rest
comes from the first event. The stages sum to the cold TTFT exactly.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.engine.events import TokenEvent

START_TIME_FIELD = 19
"""Index of ``starttime`` in /proc/PID/stat behind the program's name (field 22 of proc(5))."""


@dataclass(frozen=True)
class Stage:
    """One bar of the waterfall."""

    name: str
    duration_ns: int


def process_start_ns() -> int | None:
    """When this process started, on the clock of ``time.monotonic_ns``; to 10 ms or so.

    None on systems other than Linux: there is no cold TTFT there.
    """
    if sys.platform != "linux":
        return None
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    ticks = int(stat.rpartition(")")[2].split()[START_TIME_FIELD])
    since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns
    return time.monotonic_ns() - age_ns


def waterfall(
    start_ns: int, ends_ns: Sequence[tuple[str, int]], first: TokenEvent
) -> tuple[Stage, ...]:
    """The stages from ``start_ns`` to the first event: those of the caller, then the engine's.

    ``ends_ns`` are the caller's stages with the stamp of their end, in order. What lies between
    the last of them and the engine's start is the stage ``prompt`` (template and tokenizing).
    """
    assert first.parts is not None
    parts = first.parts
    stages = []
    before_ns = start_ns
    for name, end_ns in (*ends_ns, ("prompt", parts.start_ns)):
        stages.append(Stage(name, end_ns - before_ns))
        before_ns = end_ns
    return (
        *stages,
        Stage("lookup", parts.lookup_ns),
        Stage("prefill", parts.prefill_ns),
        Stage("sample", parts.sample_ns),
    )
