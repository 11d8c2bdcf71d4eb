"""Section ``env``: which machine this is, and the clocks before anything runs."""

import platform
import subprocess
from pathlib import Path

import torch
import triton

import llmrun
from gpu.bench import Bench
from gpu.journal import Values
from gpu.run import Case, Run

QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


def run(run: Run) -> None:
    """Describe it."""
    run.case(Case("machine", lambda: describe(run.bench)))


def describe(bench: Bench) -> Values:
    """Names, sizes, versions and clocks."""
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "source": str(Path(llmrun.__file__).resolve().parents[1]),
    }
    if bench.dry:
        return facts | {"name": "none (dry run)"}
    card = torch.cuda.get_device_properties(0)
    return facts | {
        "name": card.name,
        "capability": f"{card.major}.{card.minor}",
        "sms": card.multi_processor_count,
        "memory_gb": round(card.total_memory / 1e9, 1),
        "l2_mb": round(card.L2_cache_size / 1e6, 1),
        "cuda": torch.version.cuda,
        "clocks": clocks(),
    }


def clocks() -> dict[str, str]:
    """What the driver's tool says; empty without it."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.splitlines()[0].split(",")]
    return dict(zip(QUERY.split(","), values, strict=False))
