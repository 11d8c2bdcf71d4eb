"""Will it fit: bytes a model needs, bytes this machine has free, and the context that fits both.

Decided before anything is loaded; a model that does not fit is refused with the numbers.
"""

from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import DoesNotFitError, UsageError

KV_SHARE = 0.5
"""Part of the memory left beside the weights that an automatic context may reserve."""

WORKSPACE_BYTES = 512 << 20
"""Activations, scratch, attention scores (bounded) and what torch takes for itself."""

CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Folder, limit and usage of control groups, version 2 and 1."""


@dataclass(frozen=True)
class Need:
    """Bytes a model needs: weights as they will be resident, cache per token of context."""

    weight_bytes: int
    kv_bytes_per_token: int


def free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be taken without swapping, container limits included; None if unknown."""
    limits = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" in values:
        limits.append(int(values["MemAvailable"].split()[0]) * 1024)
    for folder, limit_file, usage_file in CGROUPS:
        limit, usage = _number(root / folder / limit_file), _number(root / folder / usage_file)
        if limit is not None and usage is not None:
            # Files that were read count as usage, but the system gives them up when asked.
            limits.append(max(0, limit - usage + _file_cache(root / folder / "memory.stat")))
    return min(limits, default=None)


def fit_context(
    need: Need, wanted: int | None, max_positions: int, free: int | None
) -> tuple[int, str | None]:
    """The context to run with, and a note if it was decided by memory.

    ``wanted`` None: as long as the model was trained for, less if memory is short. UsageError for
    a longer one; DoesNotFitError with the numbers if weights or the wanted context do not fit.
    """
    if wanted is not None and wanted > max_positions:
        raise UsageError(
            f"--ctx {wanted} is longer than the {max_positions} tokens the model was trained for",
            f"use --ctx {max_positions} or less",
        )
    if free is None:
        return wanted or max_positions, None
    left = free - need.weight_bytes - WORKSPACE_BYTES
    if left < need.kv_bytes_per_token:
        raise DoesNotFitError(
            f"the model needs {_gib(need.weight_bytes)} for its weights and "
            f"{_gib(WORKSPACE_BYTES)} to work; {_gib(free)} of memory are free",
            "use fewer bits (-q int4), a smaller model (`llmrun list --catalog`), "
            "or close other programs",
        )
    fitting = left // need.kv_bytes_per_token
    if wanted is not None:
        if wanted > fitting:
            raise DoesNotFitError(
                f"--ctx {wanted} needs {_gib(wanted * need.kv_bytes_per_token)} for the cache; "
                f"beside the weights {_gib(left)} of memory are free",
                f"use --ctx {fitting} or less, or fewer bits (-q int4)",
            )
        return wanted, None
    automatic = min(max_positions, max(1, int(fitting * KV_SHARE)))
    if automatic == max_positions:
        return automatic, None
    return automatic, (
        f"context {automatic} of {max_positions} tokens: more would take over half of the free "
        "memory (--ctx sets it)"
    )


def _file_cache(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("inactive_file", values.get("total_inactive_file", "0")))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f} GiB"
