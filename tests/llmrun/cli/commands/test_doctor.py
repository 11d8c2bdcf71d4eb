"""The engine line of doctor: the native library, or torch and how to get the library."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from llmrun.kernels import cuda
from llmrun.kernels.cpu import library


@pytest.mark.slow
def test_the_native_library_is_named_with_its_instruction_set(
    llmrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "problem", lambda: None)
    monkeypatch.setattr(library, "library", lambda: SimpleNamespace(llmr_isa=lambda: b"avx9"))
    engine = json.loads(llmrun("doctor", "--json").out)["cpu_engine"]
    assert (engine["name"], engine["isa"], engine["problem"]) == ("native", "avx9", None)
    assert engine["threads"] >= 1
    text = llmrun("doctor").out
    assert f"native library for avx9, {engine['threads']} threads" in text
    assert engine["threads_why"] in text
    assert "compiler" not in text


@pytest.mark.slow
def test_without_the_library_the_reason_and_the_remedy_are_shown(
    llmrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "problem", lambda: "built without a compiler")
    engine = json.loads(llmrun("doctor", "--json").out)["cpu_engine"]
    assert (engine["name"], engine["isa"]) == ("torch", None)
    text = llmrun("doctor").out
    assert "built without a compiler" in text
    assert "install a C++ compiler" in text


@pytest.mark.slow
def test_cards_are_shown_with_what_our_kernels_think_of_them(
    llmrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "Tesla T4 has compute capability 7.5, these kernels need 8.0 or newer"
    found = (
        cuda.Card(0, "Tesla T4", 16 * 10**9, 15 * 10**9, "7.5"),
        cuda.Card(1, "NVIDIA H200", 150 * 10**9, 149 * 10**9, "9.0"),
    )
    monkeypatch.setattr(cuda, "cards", lambda: found)
    monkeypatch.setattr(cuda, "driver_version", lambda: "570.86.15")
    monkeypatch.setattr(cuda, "why_not", lambda device, least=None: old if least else None)
    monkeypatch.setattr("llmrun.kernels.reference.why_not", lambda device: None)
    document = json.loads(llmrun("doctor", "--device", "cuda", "--json").out)
    assert document["gpus"]["driver"] == "570.86.15"
    assert document["gpus"]["problem"] is None
    assert document["gpus"]["cards"][1] == {
        "index": 1, "name": "NVIDIA H200", "total_bytes": 150 * 10**9, "free_bytes": 149 * 10**9,
        "capability": "9.0",
    }  # fmt: skip
    (linear,) = (k for k in document["kernels"] if (k["op"], k["form"]) == ("norm_linear", "int4"))
    assert (linear["backend"], linear["rejected"]["gpu"]) == ("reference", old)
    text = llmrun("doctor", "--device", "cuda").out
    assert "Tesla T4, 16.0 GB, 15.0 GB free, compute capability 7.5" in text
    assert "cuda:1" in text
    assert "570.86.15" in text
    assert "cards unused" not in text


@pytest.mark.slow
def test_cards_that_torch_cannot_use_are_shown_with_the_reason(
    llmrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (cuda.Card(0, "NVIDIA L4", 24 * 10**9, 23 * 10**9, "8.9"),)
    monkeypatch.setattr(cuda, "cards", lambda: found)
    monkeypatch.setattr(cuda, "driver_version", lambda: None)
    monkeypatch.setattr(cuda, "why_not", lambda *_: "this torch is built without CUDA")
    text = llmrun("doctor").out
    assert "NVIDIA L4" in text
    assert "cards unused" in text
    assert "built without CUDA" in text


@pytest.mark.slow
def test_without_a_card_there_is_no_line_about_one(llmrun: Any) -> None:
    if cuda.has_nvidia_driver():
        pytest.skip("there is an NVIDIA driver")
    assert json.loads(llmrun("doctor", "--json").out)["gpus"] == {
        "driver": None, "problem": "no NVIDIA driver is installed", "kernels_need": "8.0",
        "cards": [],
    }  # fmt: skip
    assert "NVIDIA driver\n" not in llmrun("doctor").out
