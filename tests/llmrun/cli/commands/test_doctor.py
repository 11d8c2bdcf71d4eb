"""The engine line of doctor: the native library, or torch and how to get the library."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

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
