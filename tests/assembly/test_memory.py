"""Free memory from fixture trees, and the context that fits."""

from pathlib import Path

import pytest

from llmrun.cli.memory import WORKSPACE_BYTES, Need, Room, fit_context, free_bytes
from llmrun.errors import DoesNotFitError, UsageError

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:    4194304 kB\n"}


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    assert free_bytes(tree(tmp_path / "a", MEMINFO)) == 4 * GIB
    v2 = {"sys/fs/cgroup/memory.max": f"{2 * GIB}\n", "sys/fs/cgroup/memory.current": f"{GIB}\n"}
    assert free_bytes(tree(tmp_path / "b", MEMINFO | v2)) == GIB
    cache = {"sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n"}
    assert free_bytes(tree(tmp_path / "c", MEMINFO | v2 | cache)) == GIB + GIB // 2
    unlimited = v2 | {"sys/fs/cgroup/memory.max": "max\n"}
    assert free_bytes(tree(tmp_path / "d", MEMINFO | unlimited)) == 4 * GIB
    v1 = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
    }
    assert free_bytes(tree(tmp_path / "e", MEMINFO | v1)) == 2 * GIB
    assert free_bytes(tmp_path / "nothing") is None


def host(free: int | None) -> Room:
    return Room("memory", free)


NEED = Need(weight_bytes=GIB, kv_bytes_per_token=1 << 20)


def test_auto_takes_all_positions_where_they_fit() -> None:
    assert fit_context(NEED, None, 1000, host(64 * GIB)) == (1000, None)
    assert fit_context(NEED, None, 1000, host(None)) == (1000, None)


def test_auto_is_shortened_by_memory_and_says_so() -> None:
    free = host(GIB + WORKSPACE_BYTES + (100 << 20))
    context, note = fit_context(NEED, None, 1000, free)
    assert context == 50
    assert note is not None
    assert "50 of 1000" in note


def test_a_wanted_context_is_met_or_refused_with_numbers() -> None:
    free = host(GIB + WORKSPACE_BYTES + (100 << 20))
    assert fit_context(NEED, 100, 1000, free) == (100, None)
    with pytest.raises(DoesNotFitError) as refused:
        fit_context(NEED, 101, 1000, free)
    assert "--ctx 101" in refused.value.what
    assert "--ctx 100" in refused.value.next_step
    with pytest.raises(UsageError, match="1000 tokens"):
        fit_context(NEED, 1001, 1000, free)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DoesNotFitError, match=r"1\.00 GiB for its weights"):
        fit_context(NEED, None, 1000, host(GIB // 2))
