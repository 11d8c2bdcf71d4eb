"""What a pipeline must not wait for: libraries that one answer on the CPU has no use for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.kernels.cpu import BACKEND as NATIVE

HEAVY = ("torch", "numpy", "bitsandbytes", "huggingface_hub", "transformers", "safetensors")
DRAWING = ("rich", "prompt_toolkit", "pydantic")
OTHERS_PROCESS = ("jinja2",)  # the template is rendered in a child process

REPORT = f"""
import atexit, json, os, sys
names = {(*HEAVY, *DRAWING, *OTHERS_PROCESS, "tokenizers")!r}
def report():
    os.write(2, (chr(10) + json.dumps([n for n in names if n in sys.modules])).encode())
atexit.register(report)
"""
RUN = "from llmrun.cli.app import main; main({arguments!r})"
UP_TO_THE_WEIGHTS = """
from types import SimpleNamespace
from llmrun.cli import assemble
facts = dict(name="none", device="cpu", threads=1, isa=None, prefill_tokens=256)
nothing = lambda *_: None
backend = SimpleNamespace(
    free_bytes=nothing, workspace_bytes=nothing, kv_layer=nothing, widening=lambda kind: 0, **facts
)
assemble.dispatch.bind = lambda device, threads, options: backend
def weights(*unused): raise SystemExit(7)
assemble._build = weights
"""


def loaded_after(
    *arguments: str, before: str = "", stdin: bytes = b""
) -> tuple[list[str], subprocess.CompletedProcess[bytes]]:
    """Run llmrun in a process of its own; which of the libraries are loaded when it ends."""
    code = REPORT + before + RUN.format(arguments=list(arguments))
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=stdin,
        capture_output=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        timeout=120,
    )
    return json.loads(done.stderr.splitlines()[-1]), done


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], []])
def test_help_needs_no_library(arguments: list[str]) -> None:
    loaded, done = loaded_after(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    assert b"llmrun" in done.stdout
    assert loaded == []


def test_a_pipeline_up_to_its_weights_needs_the_tokenizer_only(starter_gguf: Path) -> None:
    loaded, done = loaded_after("run", "-n", "1", before=UP_TO_THE_WEIGHTS, stdin=b"Good morning.")
    assert (done.returncode, done.stdout) == (7, b""), done.stderr.decode()
    assert loaded == ["tokenizers"]


@pytest.mark.skipif(
    NATIVE.available("cpu") is not None, reason=f"no native kernels: {NATIVE.available('cpu')}"
)
@pytest.mark.parametrize("options", [[], ["--raw"], ["--temperature", "0.7", "--top-k=40"]])
def test_a_whole_answer_on_the_cpu_needs_the_tokenizer_only(
    options: list[str], starter_gguf: Path
) -> None:
    loaded, done = loaded_after("run", "-n", "3", *options, stdin=b"Good morning.")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.strip()
    assert loaded == ["tokenizers"]
