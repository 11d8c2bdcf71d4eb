"""The comparison's machinery with engines that are a few lines long."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Module = Callable[[str], ModuleType]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENGINE = f"""
import os, signal, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from work import serve

class Engine:
    facts = {{"engine": "small"}}
    vocab = 1000
    def forget(self, sequence, length):
        pass
    def feed(self, sequence, position, ids):
        time.sleep(PREFILL_S)
    def step(self, position, token_id, sequences):
        DIE
        time.sleep(0.001)

serve(Engine(), 2)
"""
CRASH = "os.kill(os.getpid(), signal.SIGSEGV)"
LEAVE = "raise SystemExit('no more memory')"


def engine(folder: Path, name: str, prefill_s: float, die: str = "") -> Path:
    path = folder / f"{name}.py"
    path.write_text(ENGINE.replace("PREFILL_S", str(prefill_s)).replace("DIE", die or "pass"))
    return path


@pytest.mark.slow
def test_engines_take_turns_and_the_first_round_does_not_count(
    module: Module, tmp_path: Path
) -> None:
    rows, contest = module("rows"), module("contest")
    fast, slow = engine(tmp_path, "fast", 0.01), engine(tmp_path, "slow", 0.04)
    contenders = tuple(rows.Contender(path.stem, str(path), tmp_path) for path in (fast, slow))
    row = rows.Row("test", "", contenders, (rows._prefill(20),), 64, 2)
    outcome = contest.run(row, sys.executable, 1, 3)
    speeds = outcome.speeds["prefill 20"]
    assert [len(samples) for samples in speeds.values()] == [3, 3]
    quick, late = (outcome.spread("prefill 20", name) for name in speeds)
    assert 2 < quick.median / late.median < 6
    assert not outcome.failures


@pytest.mark.parametrize(
    ("end", "reason"),
    [(CRASH, "crashed with SIGSEGV"), (LEAVE, "ended with status 1: no more memory")],
)
def test_an_engine_that_ends_early_is_named_with_the_reason(
    module: Module, tmp_path: Path, end: str, reason: str
) -> None:
    rows, contest = module("rows"), module("contest")
    good, bad = engine(tmp_path, "good", 0.001), engine(tmp_path, "bad", 0.001, end)
    contenders = tuple(rows.Contender(path.stem, str(path), tmp_path) for path in (good, bad))
    row = rows.Row("test", "", contenders, (rows._prefill(4), rows._decode(2)), 64, 2)
    outcome = contest.run(row, sys.executable, 1, 1)
    assert outcome.failures == {"llama.cpp bad": reason}
    assert len(outcome.speeds["decode 2"]["llama.cpp good"]) == 1
    assert "llama.cpp bad" not in outcome.speeds["decode 2"]


def test_work_starts_from_the_asked_depth_and_fills_it_once(
    module: Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = module("work")
    calls: list[tuple[object, ...]] = []

    class Engine:
        facts: dict[str, object] = {}  # noqa: RUF012 - never changed
        vocab = 1000

        def forget(self, sequence: int, length: int) -> None:
            calls.append(("forget", sequence, length))

        def feed(self, sequence: int, position: int, ids: list[int]) -> None:
            calls.append(("feed", sequence, position, len(ids)))

        def step(self, position: int, token_id: int, sequences: int) -> None:
            calls.append(("step", position, sequences))

    decode = '{"work": "decode", "tokens": 2, "depth": 8, "sequences": 1}'
    monkeypatch.setattr(sys, "stdin", [decode, decode, '{"work": "prefill", "tokens": 4}', decode])
    work.serve(Engine(), 1)
    steps = [("step", 8, 1), ("step", 9, 1)]
    filled = [("forget", 0, 0), ("feed", 0, 0, 8), *steps]
    prefill = [("forget", 0, 0), ("feed", 0, 0, 4)]
    assert calls == [*filled, ("forget", 0, 8), *steps, *prefill, *filled]
    assert capsys.readouterr().out.count("seconds") == 4


@pytest.mark.parametrize(
    ("cores", "threads", "hogs", "share"),
    [(2, 2, 1, 2 / 3), (2, 1, 1, 1), (4, 4, 4, 1 / 2), (1, 1, 1, 1 / 2), (2, 4, 4, 1 / 2)],
)
def test_fair_share(module: Module, cores: int, threads: int, hogs: int, share: float) -> None:
    assert module("rows").fair_share(cores, threads, hogs) == pytest.approx(share)


@pytest.mark.parametrize(
    ("noted", "found"),
    [
        (b"\0GCC: (Debian 12.2.0-14) 12.2.0\0", "GCC: (Debian 12.2.0-14) 12.2.0"),
        (b"\0Ubuntu clang version 18.1.3 (1)\0", "clang version 18.1.3"),
        (b"nothing", None),
    ],
)
def test_a_library_tells_its_compiler(
    module: Module, tmp_path: Path, noted: bytes, found: str | None
) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"\x7fELF" + noted)
    assert module("work").compiler(path) == found
