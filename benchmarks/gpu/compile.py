"""Section ``compile``: every kernel that later sections launch, compiled beforehand side by side.

Each process launches its share of the cases once, which leaves the machine code in the cache that
all share. (Compiling holds Python's lock, so threads would take turns.)
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from gpu.bench import Bench
from gpu.journal import Values
from gpu.run import Case, Run

PROCESSES = 14
PROCESS_BYTES = 6 << 30
"""GPU memory of one of them."""


def run(run: Run) -> None:
    """Start the processes and wait for them, as long as there is time."""
    run.case(Case("kernels", lambda: _compile(run)))


def _compile(run: Run) -> Values:
    start_s = time.monotonic()
    count = _processes(run.bench)
    lines, late = _gather(_start(run.bench.dry, count), run)
    done = [line for line in lines if "case" in line]
    ends = [line for line in lines if "kernels" in line]
    return {
        "processes": count,
        "cases": len(done),
        "unfinished": late,
        "cpu_s": round(sum(line["seconds"] for line in done), 1),
        "wall_s": round(time.monotonic() - start_s, 1),
        "kernels": sum(end["kernels"] for end in ends),
        "spilled": sorted({name for end in ends for name in end["spilled"]}),
        "failed": {line["case"]: line["why"] for line in done if line["why"]},
    }


def _processes(bench: Bench) -> int:
    if bench.dry:
        return 1
    import torch

    room = torch.cuda.mem_get_info()[0] // PROCESS_BYTES
    return max(1, min(PROCESSES, len(os.sched_getaffinity(0)) - 1, room))


def _start(dry: bool, count: int) -> Iterator["subprocess.Popen[bytes]"]:
    for index in range(count):
        orders = json.dumps({"dry": dry, "index": index, "count": count})
        yield subprocess.Popen(
            [sys.executable, "-m", "gpu.warm", orders], stdout=subprocess.PIPE, stderr=sys.stderr
        )


def _gather(
    processes: Iterator["subprocess.Popen[bytes]"], run: Run
) -> tuple[list[dict[str, Any]], int]:
    """What they said, and how many were not done in time."""
    started = list(processes)
    late, lines = 0, []
    for process in started:
        try:
            said, _ = process.communicate(timeout=max(0.1, run.left_s() - 1))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            late += 1
        lines += [json.loads(line) for line in said.splitlines() if line.startswith(b"{")]
    return lines, late
