"""How many processors this process may use: affinity and the container's quota, not the box's."""

import os
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_processors(cgroups: Path = CGROUPS) -> int:
    """Processors allowed by affinity, cut by the CPU quota of the control group; at least 1."""
    if sys.platform == "linux":
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = _quota(cgroups)
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def _quota(cgroups: Path) -> float | None:
    """Processors by quota: version 2 of control groups, else version 1; None if unlimited."""
    words = _words(cgroups / "cpu.max")
    if words is None:
        quota = _words(cgroups / "cpu" / "cpu.cfs_quota_us")
        period = _words(cgroups / "cpu" / "cpu.cfs_period_us")
        words = [*quota, *period] if quota and period else None
    if words is None or len(words) != 2 or not all(word.isdecimal() for word in words):
        return None  # "max", -1 or no such file: no limit
    return int(words[0]) / int(words[1]) if int(words[1]) else None


def _words(path: Path) -> list[str] | None:
    try:
        return path.read_text("ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
