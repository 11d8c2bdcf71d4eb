"""How many threads to compute with: one for each fast physical core this process may really use.

A thread beyond that waits for the others at every barrier: the second thread of a core shares its
arithmetic, a slow core holds the fast ones up, and a quota stops all threads at once. Everything is
read from the system's files below a root folder, so tests lay out machines of their own; what a
system does not tell is no limit. Nothing is cached.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

FAST = 0.75
"""A core counts as fast from this share of the strongest core's capacity (ARM big.LITTLE)."""


@dataclass(frozen=True)
class Threads:
    """``count`` threads are best, for the reason ``why`` (a phrase: "4 physical cores").

    Up to ``most`` can run at the same time (a processor for each, within the quota); ``limit``
    is what sets that (a phrase: "8 processors", "the container's CPU quota").
    """

    count: int
    why: str
    most: int
    limit: str


def recommended_threads(root: Path = Path("/"), affinity: Collection[int] | None = None) -> Threads:
    """Threads for this process, at least 1.

    ``root`` and ``affinity`` (processor numbers; None: this process' own) are for tests.
    """
    if sys.platform == "linux":
        return linux_threads(root, os.sched_getaffinity(0) if affinity is None else affinity)
    if sys.platform == "darwin":
        return apple_threads(_sysctl, os.cpu_count() or 1)
    # Windows and others: the standard library tells no more than this.
    most = os.cpu_count() or 1
    return Threads(most, _plural(most, "processor"), most, _plural(most, "processor"))


def linux_threads(root: Path, affinity: Collection[int]) -> Threads:
    """Fast physical cores among the processors of ``affinity``, cut by the cgroup's CPU quota."""
    allowed = set(affinity) or {0}
    fast = _fast(root, allowed)
    cores = _cores(root, fast)
    count = len(cores) if cores else len(fast)
    name = "processor" if not cores else "physical core" if fast == allowed else "performance core"
    why = _plural(count, name)
    if _processors(_text(root / "sys/devices/system/cpu/online") or "") - allowed:
        why += " open to this process"
    most, limit = len(allowed), _plural(len(allowed), "processor")
    quota = cpu_quota(root)
    if quota is not None and quota < most:
        most, limit = max(1, int(quota)), "the container's CPU quota"
    if most < count:
        count, why = most, f"cut to {most} by {limit}"
    return Threads(count, why, most, limit)


def apple_threads(sysctl: Callable[[str], int | None], processors: int) -> Threads:
    """Performance cores of macOS; all physical cores where all are alike. It has no quotas."""
    kinds = {"hw.perflevel0.physicalcpu": "performance core", "hw.physicalcpu": "physical core"}
    known = [(sysctl(key) or 0, name) for key, name in kinds.items()]
    count, name = next((k for k in known if k[0] > 0), (processors, "processor"))
    most = max(count, processors)
    return Threads(count, _plural(count, name), most, _plural(most, "processor"))


def cpu_quota(root: Path) -> float | None:
    """Processors' worth of time the control groups of this process grant; None: no limit.

    Every group from the process' own up to the root may limit it; the smallest counts. Both
    versions of control groups are read, as a system may run both.
    """
    groups = root / "sys/fs/cgroup"
    quotas = []
    for line in (_text(root / "proc/self/cgroup") or "0::/\n1:cpu:/").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for base in (groups, groups / "unified"):
                quotas += [_quota_v2(folder) for folder in _upwards(base, path)]
        elif "cpu" in controllers.split(","):
            for base in (groups / controllers, groups / "cpu"):
                quotas += [_quota_v1(folder) for folder in _upwards(base, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _upwards(base: Path, path: str) -> Iterable[Path]:
    """The folder of a group and all above it, down to ``base`` itself.

    In a container the path may be the host's, of which ``base`` shows the last part alone, or
    begin with ``..``: folders that do not exist hold no quota, ``base`` always counts.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _quota_v2(folder: Path) -> float | None:
    return _ratio(*[*(_text(folder / "cpu.max") or "").split(), "", ""][:2])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return _ratio((quota or "").strip(), (period or "").strip())


def _ratio(quota: str, period: str) -> float | None:
    """None for "max", -1 and anything else that is no limit."""
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)


def _fast(root: Path, allowed: set[int]) -> set[int]:
    """The fast ones of these processors; all of them where none is marked as faster."""
    performance = _processors(_text(root / "sys/devices/cpu_core/cpus") or "")  # x86 hybrids
    if performance & allowed:
        return performance & allowed
    capacities = {
        cpu: int(text)
        for cpu in allowed
        if (text := (_text(_cpu(root, cpu) / "cpu_capacity") or "").strip()).isdecimal()
    }
    if len(capacities) < len(allowed):
        return allowed
    least = FAST * max(capacities.values())
    return {cpu for cpu, capacity in capacities.items() if capacity >= least}


def _cores(root: Path, processors: set[int]) -> set[tuple[str, ...]]:
    """The physical cores these processors are threads of; empty if the system does not tell.

    A core's number counts within its cluster on ARM and within its die on some x86 servers.
    """
    levels = ("physical_package_id", "die_id", "cluster_id", "core_id")
    cores = set()
    for cpu in processors:
        numbers = [_text(_cpu(root, cpu) / "topology" / level) for level in levels]
        if numbers[-1] is None:
            return set()
        cores.add(tuple((number or "").strip() for number in numbers))
    return cores


def _cpu(root: Path, number: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{number}"


def _processors(text: str) -> set[int]:
    """Numbers of a list such as ``0-3,8``; empty for anything else."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return set()
        found.update(range(int(first), int(last or first) + 1))
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None


def _sysctl(name: str) -> int | None:
    """A whole number the kernel of macOS tells by name; None if it knows no such name."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.value


def _plural(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
