"""What loading costs in memory, and huge pages switched off (complaint 13)."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.library import problem

pytestmark = pytest.mark.skipif(problem() is not None, reason="no native library")

MB = 1_000_000

LOAD = """
import json, re, sys, threading, time
from pathlib import Path
from llmrun.cli.source import open_source
from llmrun.engine.cache import KvCache
from llmrun.engine.generate import generate
from llmrun.engine.sampler import Sampler
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.ops import Sampling
from llmrun.model.decoder import build

def status(name):
    text = open("/proc/self/status").read()
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", text)[1])

own = []  # memory that no file holds, every 2 ms

def watch():
    while True:
        own.append(status("RssAnon"))
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
source = open_source(Path(sys.argv[1]))
backend = CpuBackend(2, huge_pages=sys.argv[2] == "on")
before, own_before = status("VmRSS"), status("RssAnon")
decoder = build(source.binding.spec, source.tensors(lambda _, form: form), backend)
backend.synchronize()
loaded, own_peak = status("VmRSS"), max(own)
cache = KvCache(backend, source.binding.spec, 1, 8192)
sampler = Sampler(Sampling(), source.binding.spec.vocab)
prompt = [1, 504, 3575, 282, 4649, 314] * 50
events = list(generate(decoder, cache, prompt, sampler, stop_ids=(), max_tokens=20))
touched = len(cache.ids(0)) * cache.bytes_per_token
print(json.dumps({
    "loaded": loaded - before,
    "own_peak": own_peak - own_before,
    "samples": len(own),
    "used": status("VmRSS") - before,
    "packed": decoder.weight_bytes,
    "touched": touched,
    "reserved": cache.nbytes,
    "generated": len(events),
}))
"""


def load(path: Path, huge: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), huge], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("huge", ["on", "off"])
def test_13_weights_are_in_memory_once(starter_gguf: Path, huge: str) -> None:
    m = load(starter_gguf, huge)
    assert m["packed"] > 80 * MB  # the check means something
    assert m["loaded"] <= 1.05 * m["packed"] + 64 * MB
    # At no time packed and unpacked together: pages of the file, which the system may take back at
    # any time, do not count.
    assert m["samples"] > 10
    assert m["own_peak"] <= 1.05 * m["packed"] + 64 * MB
    assert m["generated"] == 20
    assert m["used"] <= 1.05 * m["packed"] + m["touched"] + 64 * MB
    assert m["reserved"] > 10 * m["touched"]  # the context is reserved, not taken


def test_huge_pages_change_no_bit(tiny: ModuleType) -> None:
    made, text = tiny.forms("int4 g32"), tiny.ids(20)
    runs = [
        tiny.run(tiny.decoder(made, CpuBackend(2, huge_pages=huge)), text, [12, *[1] * 8])
        for huge in (True, False)
    ]
    assert runs[0] == runs[1]
