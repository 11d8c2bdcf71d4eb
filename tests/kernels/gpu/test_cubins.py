"""Machine code of every kernel, compiled without a GPU: it fits, it does not spill, and the linears
keep to the instructions a card can issue while it reads their weights."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parent / "cubins.py"
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory of one program, by compute capability."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    ran = subprocess.run(
        [sys.executable, PROGRAM, str(len(os.sched_getaffinity(0)))],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    errors = [report for report in found if "error" in report]
    assert not errors, errors
    return found


def test_every_capability_is_compiled_for(reports: list[dict[str, Any]]) -> None:
    assert {report["cc"] for report in reports} == set(SHARED_BYTES)


def test_nothing_spills(reports: list[dict[str, Any]]) -> None:
    spilt = [r for r in reports if r["stack"] or r["local"] or r["spills"]]
    assert not spilt


def test_shared_memory_is_within_the_cards_limit(reports: list[dict[str, Any]]) -> None:
    assert not [r for r in reports if r["shared"] > SHARED_BYTES[r["cc"]]]


def test_weights_are_read_128_bits_at_a_time(reports: list[dict[str, Any]]) -> None:
    gated = [r for r in reports if "gate" in r]
    assert gated
    assert not [r for r in gated if r["wide"] < r["wide_needed"]]


def test_sums_are_taken_in_the_same_order_for_any_number_of_rows(
    reports: list[dict[str, Any]],
) -> None:
    # A row's bits must not depend on the rows beside it, hence not on the size of its tile.
    orders: dict[tuple[str, int], list[list[str]]] = {}
    for report in reports:
        if size := re.search(r" m(8|16|32)$", report["name"]):
            key = report["name"][: size.start()], report["cc"]
            orders.setdefault(key, []).append(report["layouts"])
    several = {key: found for key, found in orders.items() if len(found) > 1}
    assert several
    assert not [key for key, found in several.items() if any(f != found[0] for f in found)]


def test_instructions_per_weight(reports: list[dict[str, Any]]) -> None:
    missed = [
        f"{r['name']} cc {r['cc']}: {r['per_weight']:.2f} > {r['gate']}"
        for r in reports
        if "gate" in r and r["per_weight"] > r["gate"]
    ]
    assert not missed
