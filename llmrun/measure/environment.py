"""The machine a measurement was taken on, as far as the standard library can tell."""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

Environment = dict[str, str | int | None]


def environment(versions: Mapping[str, str]) -> Environment:
    """The ``env`` object of a bench record; ``versions`` are added as ``<name>_version``.

    Fields: ``cpu`` (model name), ``cores`` (logical), ``usable_cores`` (this process may use),
    ``memory_bytes``, ``os``, ``python_version``. None where this system does not tell.
    """
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": _usable_cores(),
        "memory_bytes": _memory_bytes(),
        "os": platform.platform(),
        "python_version": platform.python_version(),
        **{f"{name}_version": version for name, version in versions.items()},
    }


def peak_host_bytes() -> int | None:
    """Largest resident memory of this process so far; None where this system does not tell.

    Linux reports it twice. The figure of ``getrusage`` includes what the process held before it
    became this program, so the kernel's own status file comes first.
    """
    status = _field(Path("/proc/self/status"), "VmHWM")
    if status is not None:
        return int(status.split()[0]) * 1024
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cpu_model() -> str | None:
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or None


def _usable_cores() -> int | None:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _field(path: Path, name: str) -> str | None:
    """The value of the first ``name: value`` line of a file; None without such a line or file."""
    if not path.exists():
        return None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
