"""The cold start of ``llmrun run`` beside ``import torch`` and, if one is given, another program.

Each round starts every program once, in turn, so that a neighbour's load hits all of them; medians
are compared, never single times. Files are in the page cache and bytecode is compiled (a round
before the first warms both up), as on a machine where llmrun ran before.

    python benchmarks/cold_start.py --rounds 9 --peer 'llama-cli -m starter.gguf -n 1 -p hi'

The first token's time comes from llmrun's own clock, which counts from the start of the process;
of the others the whole process counts.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from llmrun.measure.environment import environment

TORCH = "import torch"
HELP = "llmrun --help"
RUN = "llmrun run, whole process"
FIRST = "llmrun run, first token"
PEER = "peer"
PROMPT = b"Write a haiku about a pipe."

LIMITS = {FIRST: 0.35, HELP: 0.12}
"""What these may take of the time of ``import torch``."""

PEER_LIMIT = 1.5
"""What the first token may take of the other program's time."""


def main() -> None:
    """Measure and print."""
    options = _options()
    programs = _programs(options.model, options.peer)
    times_ms: dict[str, list[float]] = {name: [] for name in programs}
    waterfalls: list[Mapping[str, float]] = []
    with tempfile.TemporaryDirectory() as compiled:
        for number in range(options.rounds + 1):
            for name, command in programs.items():
                took_ms, output = _timed(command, compiled)
                if number == 0:
                    continue
                times_ms[name].append(took_ms)
                if name == RUN:
                    timings = json.loads(output)["timings"]
                    times_ms.setdefault(FIRST, []).append(timings["cold_ttft_ms"])
                    waterfalls.append(timings["cold_parts_ms"])
    _show(times_ms, waterfalls)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peer", metavar="CMD", help="another program's command line")
    return parser.parse_args()


def _programs(model: str, peer: str | None) -> dict[str, Sequence[str]]:
    llmrun = [sys.executable, "-m", "llmrun"]
    programs: dict[str, Sequence[str]] = {
        TORCH: [sys.executable, "-c", TORCH],
        HELP: [*llmrun, "--help"],
        RUN: [*llmrun, "run", "-m", model, "-n", "1", "--json", "--device", "cpu"],
    }
    return programs | ({PEER: shlex.split(peer)} if peer else {})


def _timed(command: Sequence[str], compiled: str) -> tuple[float, bytes]:
    """Milliseconds of a whole process and its output; SystemExit if it fails."""
    environ = os.environ | {"PYTHONPYCACHEPREFIX": compiled}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    start_ns = time.monotonic_ns()
    done = subprocess.run(command, input=PROMPT, capture_output=True, env=environ, check=False)
    took_ms = (time.monotonic_ns() - start_ns) / 1e6
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stderr.decode('utf-8', 'replace')}")
    return took_ms, done.stdout


def _show(
    times_ms: Mapping[str, Sequence[float]], waterfalls: Sequence[Mapping[str, float]]
) -> None:
    for key, value in environment({}).items():
        if isinstance(value, str | int | float):
            print(f"{key}: {value}")
    torch_ms = statistics.median(times_ms[TORCH])
    print(f"\n{'median of ' + str(len(waterfalls)):28}{'ms':>8}{'least':>8}   of import torch")
    for name, values in times_ms.items():
        median_ms = statistics.median(values)
        limit = f"   (at most {LIMITS[name]:.2f})" if name in LIMITS else ""
        ratio = median_ms / torch_ms
        print(f"{name:28}{median_ms:8.0f}{min(values):8.0f}   {ratio:.2f}{limit}")
    if PEER in times_ms:
        ratio = statistics.median(times_ms[FIRST]) / statistics.median(times_ms[PEER])
        print(f"first token of the peer's time: {ratio:.2f} (at most {PEER_LIMIT})")
    print("\nto the first token, median ms of each stage")
    for stage in waterfalls[0]:
        print(f"{stage:28}{statistics.median(one[stage] for one in waterfalls):8.1f}")


if __name__ == "__main__":
    main()
