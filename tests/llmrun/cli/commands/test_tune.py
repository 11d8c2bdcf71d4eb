"""Measured on a GPU and kept; where there is none, that is said before anything is fetched."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrun.cli import tuned
from llmrun.cli.commands import tune
from llmrun.kernels import dispatch
from llmrun.kernels.ops import BackendInfo


def candidate(reason: str | None) -> dispatch.Candidate:
    info = BackendInfo("gpu", lambda device: reason, lambda op, kind: None, lambda *_: None)  # type: ignore[arg-type, return-value]
    return dispatch.Candidate(info, "cuda", reason)


def on_a_machine(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    monkeypatch.setattr(dispatch, "candidates", lambda device: (candidate(reason),))


@pytest.mark.parametrize("options", [[], ["--device", "cuda:1"], ["--device", "cpu"], ["--clear"]])
def test_without_a_gpu_it_says_why_and_ends_with_9(
    llmrun: Any, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    on_a_machine(monkeypatch, "no NVIDIA driver is installed")
    result = llmrun("tune", "no-such-model", *options)
    assert result.code == 9
    assert result.out == ""
    assert "no NVIDIA driver is installed" in result.err
    assert "llmrun doctor" in result.err


@pytest.mark.slow
def test_this_machine_or_the_reason(llmrun: Any) -> None:
    result = llmrun("tune", "no-such-model", "--device", "cpu")
    assert result.code == 9
    assert "cpu cannot be used: these kernels run on NVIDIA GPUs only" in result.err


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a card, a loaded model, and a search that has found something."""
    heuristics = pytest.importorskip("llmrun.kernels.gpu.heuristics")
    tuning = pytest.importorskip("llmrun.kernels.gpu.tuning")
    from llmrun.cli import loading

    on_a_machine(monkeypatch, None)
    shape = heuristics.Shape("w4", 128, 6144, 4096)
    found = tuning.Found(
        heuristics.Card(90, 132), shape, heuristics.Launch(4, (5, 4, 3), 4), 3.1e-6, 4.2e-6, 11
    )
    path = tmp_path / "tuning" / "card.json"
    monkeypatch.setattr(loading, "load", lambda *_: SimpleNamespace(decoder=None))
    monkeypatch.setattr(tune, "_measure", lambda decoder: [found])
    monkeypatch.setattr(tuned, "file_of", lambda settings, device: path)
    monkeypatch.setattr("llmrun.kernels.gpu.tuned_file.card_name", lambda device: "Card")
    return path


def test_what_is_found_is_shown_and_kept(llmrun: Any, card: Path) -> None:
    result = llmrun("tune", "some-model")
    assert result.code == 0
    assert "6144 x 4096" in result.out
    assert "w4 g128" in result.out
    assert "4 parts, 4 warps, 5 stages" in result.out
    assert f"kept in {card}" in result.err
    (kept,) = json.loads(card.read_text())["launches"]
    assert (kept["n"], kept["splits"], kept["stages"]) == (6144, 4, [5, 4, 3])


def test_as_json(llmrun: Any, card: Path) -> None:
    found = json.loads(llmrun("tune", "some-model", "--json").out)
    assert found["file"] == str(card)
    (launch,) = found["launches"]
    assert launch["us"] == pytest.approx(3.1)
    assert launch["us_before"] == pytest.approx(4.2)
    assert (launch["sm"], launch["tried"], launch["warps"]) == (90, 11, 4)


def test_it_can_be_forgotten(llmrun: Any, card: Path) -> None:
    llmrun("tune", "some-model")
    assert card.exists()
    assert "removed" in llmrun("tune", "--clear").err
    assert not card.exists()
    assert "nothing was measured" in llmrun("tune", "--clear").err


@pytest.mark.parametrize("more", [[], ["--clear"], ["--device", "cuda:1"]])
def test_offload_is_refused_and_nothing_is_kept(llmrun: Any, card: Path, more: list[str]) -> None:
    """What lies on two devices has no launches of its own to measure."""
    result = llmrun("tune", "some-model", "--offload", *more)
    assert result.code == 2
    assert result.out == ""
    assert "Leave --offload out" in result.err
    assert "kept in" not in result.err
    assert not card.exists()
