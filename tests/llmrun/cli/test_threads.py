"""Processors by affinity and quota."""

import os
import sys
from pathlib import Path

import pytest

from llmrun.cli.threads import usable_processors

ALLOWED = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_groups_affinity_decides(tmp_path: Path) -> None:
    assert usable_processors(tmp_path) == ALLOWED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        ("max 100000\n", ALLOWED),
        ("100000000 100000\n", ALLOWED),
        ("nonsense\n", ALLOWED),
    ],
)
def test_version_2(tmp_path: Path, text: str, expected: int) -> None:
    write(tmp_path, "cpu.max", text)
    assert usable_processors(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("100000", 1), ("-1", ALLOWED)])
def test_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    write(tmp_path, "cpu/cpu.cfs_quota_us", quota)
    write(tmp_path, "cpu/cpu.cfs_period_us", "100000")
    assert usable_processors(tmp_path) == expected
