"""``llmrun quantize`` on a real tiny model: what it refuses, says and leaves behind."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from llmrun.cli import quantizing
from llmrun.store.store import Store

WIDE = {"hidden_size": 128, "num_hidden_layers": 1}
"""Widths that vLLM's kernels divide."""


def test_portable_on_writes_what_vllm_loads(folder: Any, command: Any, tmp_path: Path) -> None:
    made = command(
        "quantize", str(folder(**WIDE)), "-q", "int4", "-o", str(tmp_path / "out"),
        "--portable", "on", "--calibrate", "none",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert "vLLM" not in made.err
    assert "vLLM: `vllm serve DIR`" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("scheme", "wide", "problem"),
    [
        ("int4", False, "128 divides the inputs, not so 64"),
        ("nf4", True, "it loads integers that are packed"),
        ("nl4", True, "it has no kernel for lut4 g32"),
    ],
)
def test_q002_q028_portable_decides_what_is_said_of_other_engines(
    folder: Any, command: Any, tmp_path: Path, scheme: str, wide: bool, problem: str
) -> None:
    path = str(folder(**(WIDE if wide else {})))
    asked = ("quantize", path, "-q", scheme, "--calibrate", "none", "--dry-run")
    out = ("-o", str(tmp_path / "out"))
    refused = command(*asked, "--portable", "on")  # a copy for the store, too
    assert (refused.code, refused.out) == (9, "")
    assert f"vLLM: {problem} (model.layers.0." in refused.err
    assert "--portable auto" in refused.err
    warned = command(*asked, *out)
    assert warned.code == 0
    assert f"note: other engines may refuse the result: vLLM: {problem}" in warned.err
    assert "vLLM" not in command(*asked).err  # in the store nobody else looks for it
    quiet = command(*asked, *out, "--portable", "off")
    assert quiet.code == 0
    assert "vLLM" not in quiet.err
    assert ("only llmrun loads the result" in quiet.err) is (scheme == "nl4")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantizing_to", ["int4", "int8"])
def test_a_text_that_is_not_there_is_a_usage_error(
    folder: Any, command: Any, tmp_path: Path, quantizing_to: str
) -> None:
    for out in ((), ("-o", str(tmp_path / "out"))):
        refused = command(
            "quantize", str(folder()) if not out else str(tmp_path / "model"), "-q", quantizing_to,
            "--calibrate", str(tmp_path / "missing.txt"), *out,
        )  # fmt: skip
        assert (refused.code, refused.out) == (2, "")
        assert "missing.txt cannot be read" in refused.err
        assert "auto, none, bundled, self, random" in refused.err
    assert not (tmp_path / "out").exists()


def test_a_text_for_a_scheme_that_weighs_nothing_is_refused(folder: Any, command: Any) -> None:
    refused = command("quantize", str(folder()), "-q", "nf4", "--calibrate", "bundled")
    assert refused.code == 2
    assert "nf4 would be the same with --calibrate bundled" in refused.err
    assert "leave --calibrate out" in refused.err


def test_int8_reads_a_text_only_if_it_is_told_to(folder: Any, command: Any) -> None:
    path = str(folder())
    quiet = command("quantize", path, "-q", "int8", "--dry-run")
    assert quiet.code == 0
    assert "calibrat" not in quiet.err
    told = command("quantize", path, "-q", "int8", "--dry-run", "--calibrate", "bundled")
    assert "note: calibrated on bundled text" in told.err
    # Random ids weigh errors and compensate none, and int8 has no search to weigh.
    assert command("quantize", path, "-q", "int8", "--calibrate", "random").code == 2


def test_a_dry_run_with_a_target_says_which_units_get_8_bits(
    folder: Any, command: Any, settings: Any, tmp_path: Path
) -> None:
    made = command(
        "quantize", str(folder()), "-q", "int4", "--target-bpw", "6", "--dry-run",
        "--calibrate", "none", "-o", str(tmp_path / "out"),
    )  # fmt: skip
    assert made.code == 0, made.err
    assert "of 8 units get 8 bits (" in made.err
    assert "tried on ids drawn at random" in made.err
    assert not (tmp_path / "out").exists()
    assert Store(settings.store_root).derived() == []
    refused = command("quantize", str(tmp_path / "model"), "-q", "int4", "--target-bpw", "3")
    assert refused.code == 2
    assert "--target-bpw a number from 4.500 to" in refused.err


@pytest.mark.parametrize("to_store", [True, False])
def test_ctrl_c_is_130_and_the_same_command_goes_on(
    folder: Any, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_store: bool
) -> None:
    out = () if to_store else ("-o", str(tmp_path / "out"))
    path = str(folder(num_hidden_layers=4))
    asked = ("quantize", path, "-q", "int4", "--calibrate", "random", *out)
    write = quantizing.quantize

    def pressed(*arguments: Any) -> Any:
        *given, on_tensor, stopped = arguments

        def told(name: str, done: int, total: int) -> None:
            if done > total / 3 and not stopped():
                os.kill(os.getpid(), signal.SIGINT)
                while not stopped():
                    pass
            on_tensor(name, done, total)

        return write(*given, told, stopped)

    monkeypatch.setattr(quantizing, "quantize", pressed)
    ended = command(*asked)
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.endswith("run the same command again to go on behind them.\n")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(quantizing, "quantize", write)
    again = command(*asked)
    assert again.code == 0, again.err
    assert (tmp_path / "out").exists() is not to_store


def test_ctrl_c_that_comes_too_late_does_not_promise_to_go_on(
    folder: Any, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = quantizing.quantize

    def pressed(*arguments: Any) -> Any:
        result = write(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        while not arguments[-1]():
            pass
        return result

    monkeypatch.setattr(quantizing, "quantize", pressed)
    out = tmp_path / "out"
    ended = command("quantize", str(folder()), "-q", "int8", "-o", str(out))
    assert ended.code == 130
    assert "again" not in ended.err
    assert (out / "llmrun.json").exists()


def test_the_command_it_names_finds_the_copy_again(
    folder: Any, command: Any, settings: Any
) -> None:
    path = str(folder())
    made = command("quantize", path, "-q", "int4", "--calibrate", "random", "--target-bpw", "6")
    assert made.code == 0, made.err
    run = made.err.splitlines()[-1].partition("llmrun ")[2].split()
    assert run[:1] == ["chat"]
    answer = command(*run, "-n", "2", "--threads", "1", asked=b"Hello")
    assert answer.code == 0, answer.err
    assert "made a copy" not in answer.err
    assert len(Store(settings.store_root).derived()) == 1
