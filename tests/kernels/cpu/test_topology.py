"""Threads by machines laid out as files: cores, siblings, slow cores, control groups."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.kernels.cpu.topology import (
    Threads,
    apple_threads,
    cpu_quota,
    linux_threads,
    recommended_threads,
)

PERIOD = 100_000
Lay = Callable[..., Path]


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def lay(tmp_path: Path) -> Lay:
    """Lay out a machine: (package, core) of each processor, and more topology files by name."""

    def build(cores: list[tuple[int, int]], **levels: list[int]) -> Path:
        write(tmp_path, "sys/devices/system/cpu/online", f"0-{len(cores) - 1}")
        for cpu, (package, core) in enumerate(cores):
            topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
            write(tmp_path, f"{topology}/physical_package_id", package)
            write(tmp_path, f"{topology}/core_id", core)
            for level, numbers in levels.items():
                write(tmp_path, f"{topology}/{level}", numbers[cpu])
        return tmp_path

    return build


def plain(n: int) -> list[tuple[int, int]]:
    return [(0, core) for core in range(n)]


# --- cores ---------------------------------------------------------------------------------------


def test_each_core_counts_once_whatever_its_siblings_numbers(lay: Lay) -> None:
    root = lay(plain(8) + plain(8))  # siblings are 0 and 8, 1 and 9, ...
    assert linux_threads(root, range(16)) == Threads(8, "8 physical cores", 16, "16 processors")


def test_siblings_beside_each_other(lay: Lay) -> None:
    root = lay([(0, core // 2) for core in range(8)])
    assert linux_threads(root, range(8)).count == 4


def test_same_core_number_in_two_packages_is_two_cores(lay: Lay) -> None:
    root = lay([(0, 0), (1, 0), (0, 1), (1, 1)])
    assert linux_threads(root, range(4)).count == 4


@pytest.mark.parametrize("level", ["cluster_id", "die_id"])
def test_same_core_number_in_two_clusters_or_dies_is_two_cores(lay: Lay, level: str) -> None:
    root = lay([(0, 0), (0, 1), (0, 0), (0, 1)], **{level: [0, 0, 1, 1]})
    assert linux_threads(root, range(4)).count == 4


def test_core_numbers_may_have_gaps(lay: Lay) -> None:
    root = lay([(0, 0), (0, 8), (0, 9), (0, 25)])
    assert linux_threads(root, range(4)).count == 4


def test_one_core(lay: Lay) -> None:
    assert linux_threads(lay([(0, 0), (0, 0)]), {0, 1}).why == "1 physical core"


# --- slow cores ----------------------------------------------------------------------------------


def test_hybrid_counts_performance_cores(lay: Lay) -> None:
    # 8 performance cores with two threads each, then 8 efficiency cores with one.
    root = lay([(0, cpu // 2) for cpu in range(16)] + [(0, 8 + core) for core in range(8)])
    write(root, "sys/devices/cpu_core/cpus", "0-15")
    write(root, "sys/devices/cpu_atom/cpus", "16-23")
    threads = linux_threads(root, range(24))
    assert threads == Threads(8, "8 performance cores", 24, "24 processors")


def test_hybrid_of_20_cores_without_siblings(lay: Lay) -> None:
    root = lay(plain(20))
    write(root, "sys/devices/cpu_core/cpus", "0-1,10-15")
    write(root, "sys/devices/cpu_atom/cpus", "2-9,16-19")
    assert linux_threads(root, range(20)).count == 8


def test_pinned_to_efficiency_cores_they_count(lay: Lay) -> None:
    root = lay(plain(12))
    write(root, "sys/devices/cpu_core/cpus", "0-3")
    threads = linux_threads(root, range(4, 12))
    assert (threads.count, threads.why) == (8, "8 physical cores open to this process")


def test_big_little_counts_cores_near_the_strongest(lay: Lay) -> None:
    # 4 little, 3 big and 1 prime core; core numbers start again in each cluster.
    root = lay([(0, n) for n in (0, 1, 2, 3, 0, 1, 2, 0)], cluster_id=[0, 0, 0, 0, 1, 1, 1, 2])
    for cpu, capacity in enumerate([280] * 4 + [768] * 3 + [1024]):
        write(root, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", capacity)
    assert linux_threads(root, range(8)) == Threads(4, "4 performance cores", 8, "8 processors")
    assert linux_threads(root, range(4)).count == 4  # pinned to the little ones


def test_a_core_below_three_quarters_is_slow(lay: Lay) -> None:
    root = lay(plain(2))
    write(root, "sys/devices/system/cpu/cpu0/cpu_capacity", 1024)
    write(root, "sys/devices/system/cpu/cpu1/cpu_capacity", 767)
    assert linux_threads(root, range(2)).count == 1


def test_equal_capacities_are_physical_cores(lay: Lay) -> None:
    root = lay(plain(4))
    for cpu in range(4):
        write(root, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", 1024)
    assert linux_threads(root, range(4)).why == "4 physical cores"


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"hw.perflevel0.physicalcpu": 4, "hw.physicalcpu": 8}, (4, "4 performance cores")),
        ({"hw.physicalcpu": 6}, (6, "6 physical cores")),  # Intel
        ({}, (8, "8 processors")),
    ],
)
def test_apple(known: dict[str, int], expected: tuple[int, str]) -> None:
    threads = apple_threads(known.get, 8)
    assert (threads.count, threads.why) == expected
    assert (threads.most, threads.limit) == (8, "8 processors")


# --- affinity ------------------------------------------------------------------------------------


def test_affinity_leaves_cores_out(lay: Lay) -> None:
    root = lay(plain(8) + plain(8))
    threads = linux_threads(root, {0, 8, 3})
    assert threads == Threads(2, "2 physical cores open to this process", 3, "3 processors")


def test_processors_that_are_off_are_not_missed(lay: Lay) -> None:
    root = lay(plain(4) + plain(4))
    write(root, "sys/devices/system/cpu/online", "0-3")  # siblings switched off
    assert linux_threads(root, range(4)).why == "4 physical cores"


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_the_affinity_of_this_process_counts() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from llmrun.kernels.cpu.topology import recommended_threads as r; print(r().most)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


# --- quota ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processors", "expected", "why"),
    [
        (0.5, 1, "cut to 1 by the container's CPU quota"),
        (1, 1, "cut to 1 by the container's CPU quota"),
        (1.5, 1, "cut to 1 by the container's CPU quota"),
        (3, 3, "cut to 3 by the container's CPU quota"),
        (3.99, 3, "cut to 3 by the container's CPU quota"),
        (4, 4, "4 physical cores"),
        (64, 4, "4 physical cores"),
    ],
)
def test_quota_is_rounded_down(lay: Lay, processors: float, expected: int, why: str) -> None:
    root = lay(plain(4) + plain(4))
    write(root, "proc/self/cgroup", "0::/")
    write(root, "sys/fs/cgroup/cpu.max", f"{int(processors * PERIOD)} {PERIOD}")
    threads = linux_threads(root, range(8))
    assert (threads.count, threads.why) == (expected, why)
    assert threads.most == min(8, max(1, int(processors)))


def test_smallest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pods/pod1/inner")
    for group, quota in (("", "max"), ("pods", 300_000), ("pods/pod1", 150_000)):
        write(tmp_path, f"sys/fs/cgroup/{group}/cpu.max", f"{quota} {PERIOD}")
    write(tmp_path, "sys/fs/cgroup/pods/pod1/inner/cpu.max", f"max {PERIOD}")
    write(tmp_path, "sys/fs/cgroup/pods/pod2/cpu.max", f"1000 {PERIOD}")  # a neighbour's
    assert cpu_quota(tmp_path) == 1.5


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_version_1_on_the_way_up(tmp_path: Path, folder: str) -> None:
    write(tmp_path, "proc/self/cgroup", "5:memory:/elsewhere\n4:cpu,cpuacct:/docker/abc\n0::/")
    for group, quota in (("", -1), ("docker", 400_000), ("docker/abc", 250_000)):
        write(tmp_path, f"sys/fs/cgroup/{folder}/{group}/cpu.cfs_quota_us", quota)
        write(tmp_path, f"sys/fs/cgroup/{folder}/{group}/cpu.cfs_period_us", PERIOD)
    assert cpu_quota(tmp_path) == 2.5


def test_in_a_container_the_mount_itself_is_the_group(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/docker/abc")  # a path of the host
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", 200_000)
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", PERIOD)
    assert cpu_quota(tmp_path) == 2


def test_a_path_out_of_the_container_stays_inside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root, "proc/self/cgroup", "0::/../../outside")
    write(root, "sys/fs/cgroup/cpu.max", f"200000 {PERIOD}")
    write(root, "sys/outside/cpu.max", f"100000 {PERIOD}")
    assert cpu_quota(root) == 2


@pytest.mark.parametrize("text", ["max 100000", "nonsense", "", "100000", "100000 0", "-1 100000"])
def test_no_limit(tmp_path: Path, text: str) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", text)
    assert cpu_quota(tmp_path) is None


# --- nothing to read -----------------------------------------------------------------------------


def test_without_any_file_processors_count(tmp_path: Path) -> None:
    assert linux_threads(tmp_path, range(3)) == Threads(3, "3 processors", 3, "3 processors")
    assert linux_threads(tmp_path, set()).count == 1


def test_without_group_names_the_mounts_still_count(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", f"200000 {PERIOD}")
    assert cpu_quota(tmp_path) == 2


def test_nonsense_is_no_limit(lay: Lay) -> None:
    root = lay(plain(4))
    (root / "sys/devices/cpu_core").mkdir()
    (root / "sys/devices/cpu_core/cpus").write_bytes(b"\xff0-1,x")
    (root / "sys/devices/system/cpu/cpu0/cpu_capacity").write_text("fast")
    write(root, "proc/self/cgroup", "no colons at all")
    assert linux_threads(root, range(4)).count == 4


def test_this_machine() -> None:
    threads = recommended_threads()
    assert 1 <= threads.count <= threads.most
    assert threads.why
