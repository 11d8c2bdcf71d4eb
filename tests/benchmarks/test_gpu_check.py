"""The check of the GPU kernels: its bookkeeping with sections of a few lines, and all of it dry."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Module = Callable[[str], ModuleType]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DRY_RUN_S = 280

BENCH = """
class Bench:
    dry, facts = False, {}
    def alive(self):
        return self.facts.get("alive", True)
def open_bench(dry, facts):
    bench = Bench()
    bench.facts = facts
    return bench
"""
SECTION = """
import os, signal, time
from gpu.run import Case, Run, WrongError
def fine():
    return {"number": 1}
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
def hang():
    time.sleep(60)
def wrong():
    raise WrongError("off by one")
def lose():
    raise RuntimeError("an illegal memory access")
def run(run):
    run.fact("alive", True)
    for name, work in [CASES]:
        if work is lose:
            run.bench.facts["alive"] = False
        run.case(Case(name, work, needs_s=0))
"""


@pytest.fixture
def sections(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Write a package of small sections; returns the environment to run them in."""

    def write(**cases: str) -> dict[str, str]:
        package = tmp_path / "gpu"
        package.mkdir()
        for name in ("__init__", "journal", "plan", "run", "worker"):
            shutil.copy(BENCHMARKS / "gpu" / f"{name}.py", package)
        (package / "bench.py").write_text(BENCH)
        for name, listed in cases.items():
            (package / f"{name}.py").write_text(SECTION.replace("CASES", listed))
        return {**os.environ, "PYTHONPATH": str(tmp_path)}

    return write


def conducted(module: Module, environment: dict[str, str], ends: dict[str, float]) -> Any:
    journal = module("gpu.journal").Journal(ends)
    conductor = module("gpu.conductor")
    setting = conductor.Setting(False, environment, time.monotonic() + 30)
    ended = conductor.conduct(journal, ends, setting)
    journal.close(ended)
    return journal, ended


def states(journal: Any, section: str) -> dict[str, str]:
    return {name: case.state for name, case in journal.sections[section].cases.items()}


def test_sections_end_in_time_and_keep_what_those_before_them_left(module: Module) -> None:
    plan = module("gpu.plan")
    names = [*plan.SECTIONS]
    ends = plan.ends(100.0, 480.0, names)
    assert list(ends) == names
    assert ends["e2e"] == 100 + 480 - plan.REPORT_S
    assert ends["attention"] == ends["e2e"] - plan.SECTIONS["e2e"]
    assert ends["env"] >= 100 + plan.START_S + plan.SECTIONS["env"]
    short = plan.ends(0.0, 60.0, ["gemv", "e2e"])
    assert 0 < short["gemv"] < short["e2e"] == 60 - plan.REPORT_S
    assert sum(plan.SECTIONS.values()) + plan.REPORT_S + plan.START_S <= 480


def test_a_crash_costs_one_case(module: Module, sections: Callable[..., dict[str, str]]) -> None:
    environment = sections(
        gap='("a", fine), ("b", crash), ("c", fine)', e2e='("d", wrong), ("e", fine)'
    )
    end_s = time.monotonic() + 30
    journal, ended = conducted(module, environment, {"gap": end_s, "e2e": end_s})
    assert ended == "complete"
    assert states(journal, "gap") == {"a": "ok", "b": "crashed", "c": "ok"}
    assert states(journal, "e2e") == {"d": "wrong", "e": "ok"}
    assert [journal.sections[name].state for name in ("gap", "e2e")] == ["done", "done"]
    assert [(name, case.why) for _, name, case in journal.bad()] == [
        ("b", "the process died"),
        ("d", "off by one"),
    ]


def test_after_a_lost_context_a_new_process_goes_on(
    module: Module, sections: Callable[..., dict[str, str]]
) -> None:
    environment = sections(gap='("a", fine), ("b", lose), ("c", fine)')
    journal, _ = conducted(module, environment, {"gap": time.monotonic() + 30})
    assert states(journal, "gap") == {"a": "ok", "b": "error", "c": "ok"}
    assert "an illegal memory access" in journal.sections["gap"].cases["b"].why


def test_a_section_that_hangs_is_cut_and_the_next_one_runs(
    module: Module, sections: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("gpu.conductor"), "GRACE_S", 0.2)
    environment = sections(gap='("a", fine), ("b", hang)', e2e='("c", fine)')
    now = time.monotonic()
    journal, ended = conducted(module, environment, {"gap": now + 3, "e2e": now + 30})
    assert ended == "complete"
    assert states(journal, "gap") == {"a": "ok", "b": "cut"}
    assert journal.sections["gap"].state == "cut"
    assert states(journal, "e2e") == {"c": "ok"}
    assert time.monotonic() - now < 15


def test_a_worker_that_never_starts_ends_the_run(
    module: Module, sections: Callable[..., dict[str, str]]
) -> None:
    environment = sections(gap='("a", fine)')
    (Path(environment["PYTHONPATH"]) / "gpu" / "worker.py").write_text("raise SystemExit(1)\n")
    journal, _ = conducted(module, environment, {"gap": time.monotonic() + 30})
    assert journal.sections["gap"].state == "skipped"
    assert journal.sections["gap"].why == "no worker could be started"


def test_too_little_time_is_said(module: Module, sections: Callable[..., dict[str, str]]) -> None:
    environment = sections(gap='("a", fine)')
    journal, _ = conducted(module, environment, {"gap": time.monotonic() + 1.5})
    section = journal.sections["gap"]
    assert (section.state, section.why) == ("skipped", "no time left")


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    held = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, held, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("how", ["SIGTERM", "error"])
@pytest.mark.usefixtures("handlers")
def test_whatever_happens_there_is_a_table_and_a_line(
    module: Module,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    gpu_check = module("gpu_check")

    def interrupted(journal: Any, ends: object, setting: object) -> str:
        journal.add({"at": "section", "section": "gap"})
        journal.add({"at": "case", "section": "gap", "case": "empty"})
        if how == "error":
            raise OSError("no more processes")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        raise AssertionError("the signal did nothing")

    monkeypatch.setattr(gpu_check, "conduct", interrupted)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--sections", "gap", "e2e"])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 1
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["schema"] == 1
    assert found["ended"] == ("SIGTERM" if how == "SIGTERM" else "OSError: no more processes")
    assert found["sections"]["gap"]["cases"]["empty"]["state"] == "cut"
    assert found["sections"]["e2e"]["state"] == "skipped"
    assert "8B int4: ms per token" in out


def test_goals_are_judged_by_what_was_measured(module: Module) -> None:
    journal = module("gpu.journal").Journal(["e2e", "gap"])
    for case, values in (
        ("8B int4", {"itl_p50_ms": 1.5, "first_ms": {"1024": 20.0}}),
        ("8B bf16", {"itl_p50_ms": 4.0}),
        ("1B int4", {"itl_p50_ms": 9.0}),
    ):
        journal.add(
            {"at": "result", "section": "e2e", "case": case, "state": "ok", "seconds": 1.0}
            | {"values": values, "why": None}
        )
    met = {one.goal.name: one.met for one in module("gpu.goals").verdicts(journal)}
    assert met["8B int4: ms per token"] == "must"
    assert met["8B bf16: ms per token"] == "goal"
    assert met["1B int4: ms per token"] == "missed"
    assert met["8B int4: ms to the first token of 1024"] == "goal"
    assert met["us between empty kernels of a graph"] is None


@pytest.mark.thorough
def test_everything_runs_dry(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--dry-run", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=DRY_RUN_S,
        cwd=tmp_path,
        check=False,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-2000:]}"
    assert found == json.loads(file.read_text(encoding="utf-8"))
    assert found["dry_run"]
    assert found["ended"] == "complete"
    assert {name: section["state"] for name, section in found["sections"].items()} == (
        dict.fromkeys(found["sections"], "done")
    )
    assert all(section["cases"] for section in found["sections"].values())
