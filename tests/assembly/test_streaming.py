"""A checkpoint goes through memory one tensor at a time, written anew or loaded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory of a process from /proc"),
]

MB = 1_000_000
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}

START = """
import json, sys
from pathlib import Path
import torch
from llmrun.cli.assemble import LoadOptions, load
from llmrun.cli.quantizing import convert
from llmrun.cli.settings import read_settings
from llmrun.quant.scheme import schemes
from llmrun.store.progress import SilentProgress

def status(name):
    return 1024 * int(open("/proc/self/status").read().split(name + ":")[1].split()[0])

schemes()
torch.set_num_threads(1)
model, home = Path(sys.argv[1]), Path(sys.argv[2])
settings = read_settings({"LLMRUN_HOME": str(home / "store")}, home=home)
before, resident = status("VmRSS"), 0
"""
WRITE = """
convert(str(model), "int8", home / "out", settings, SilentProgress())
"""
LOAD = """
options = LoadOptions(str(model), quant="none", device="cpu", threads=1, ctx=64, chat=False)
resident = load(options, settings, SilentProgress()).decoder.weight_bytes
"""
END = """
print(json.dumps({"more": status("VmHWM") - before, "resident": resident}))
"""


@pytest.mark.parametrize("work", [WRITE, LOAD], ids=["write", "load"])
def test_the_peak_is_one_tensor_more_than_what_stays(
    folder: Any, tmp_path: Path, work: str
) -> None:
    model = folder(**SIZES)
    total = (model / "model.safetensors").stat().st_size
    assert total > 250 * MB  # the check means something
    done = subprocess.run(
        [sys.executable, "-c", START + work + END, str(model), str(tmp_path)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    largest = 2 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert measured["more"] <= measured["resident"] + largest + 64 * MB, measured
