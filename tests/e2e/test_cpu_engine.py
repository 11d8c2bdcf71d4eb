"""The native CPU engine through whole commands."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.kernels.cpu.library import problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(problem() is not None, reason="no native library"),
]

Run = Callable[..., subprocess.CompletedProcess[bytes]]

PROMPT = b"Tell me about pipes. " * 20  # longer than what decoding takes at once


def answered(llmrun: Run, model: Path, *options: str) -> tuple[str, str]:
    """The text of an answer and what was said on stderr."""
    done = llmrun(
        "run", "-m", str(model), "--json", "-n", "40", "--ignore-eos", *options, stdin=PROMPT
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)["text"], done.stderr.decode()


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.9", "--seed", "7")])
def test_18_the_answer_does_not_depend_on_threads(
    llmrun: Run, starter_gguf: Path, sampling: tuple[str, ...]
) -> None:
    cpu = ("--device", "cpu", *sampling)
    one, _ = answered(llmrun, starter_gguf, *cpu, "--threads", "1")
    two, _ = answered(llmrun, starter_gguf, *cpu, "--threads", "2")
    assert len(one) > 40
    assert one == two


def test_14_too_many_threads_are_cut_and_said(llmrun: Run, starter_gguf: Path) -> None:
    _, said = answered(llmrun, starter_gguf, "--device", "cpu", "--threads", "5000")
    assert "--threads 5000 is cut to" in said
