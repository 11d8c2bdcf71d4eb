"""What a streamed run takes and refuses; its results are compared in tests/parity."""

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from llmrun.errors import ModelFileError
from llmrun.kernels.cpu import library as native
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.host import HostArray
from llmrun.kernels.reference.arrays import to_host
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import architectures
from llmrun.model.parameters import expected
from llmrun.model.streaming import LayerStream

ARCH = architectures()["llama"]
SPEC = ARCH.spec(ARCH.tiny[0])

MEASURED = """
import json, resource
from dataclasses import replace
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import Dense
from llmrun.kernels.host import DType, empty
from llmrun.kernels.ops import Heads
from llmrun.model.architecture import architectures
from llmrun.model.parameters import expected, layer_of
from llmrun.model.streaming import LayerStream

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

arch = architectures()["llama"]
spec = arch.spec(arch.tiny[0])
spec = replace(spec, hidden=1024, intermediate=4096, heads=Heads(16, 4, 64),
               layers=spec.layers[:1] * 12)
shapes = {name: p.shape for name, p in expected(spec).items()}

def layer(number):
    return {n: Dense(empty(DType.BF16, shape)) for n, shape in shapes.items()
            if layer_of(n) == number}

stream = LayerStream(spec, CpuBackend(2), [[1, 2, 3]], max_tokens=8)
stream.embed(layer(None))
stream.run_layer(0, layer(0))
first = peak()
for number in range(1, len(spec.layers)):
    stream.run_layer(number, layer(number))
print(json.dumps([first, peak(), sum(form.w.nbytes for form in layer(0).values())]))
"""


def tensors() -> dict[str, Form]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: Dense(to_host(torch.randn(parameter.shape, generator=generator) * 0.1))
        for name, parameter in expected(SPEC).items()
    }


@pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))
def test_one_layer_is_in_memory_at_a_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True
    )
    first, last, layer_bytes = json.loads(done.stdout)
    assert layer_bytes > 20 << 20
    assert last - first < 1.5 * layer_bytes  # twelve of them went through


def test_ids_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ModelFileError, match=f"id {SPEC.vocab}"):
        LayerStream(SPEC, TorchBackend("cpu", 1), [[1, 2], [SPEC.vocab]])


def test_whoever_stops_the_work_is_asked_before_every_chunk() -> None:
    asked = []

    def between() -> None:
        asked.append(None)
        if len(asked) == 6:
            raise KeyboardInterrupt

    stream = LayerStream(
        SPEC, TorchBackend("cpu", 1), [[1] * 10, [2] * 3], max_tokens=4, between=between
    )
    given = tensors()
    stream.embed(given)
    assert len(asked) == 4
    with pytest.raises(KeyboardInterrupt):
        stream.run_layer(0, given)


def test_an_observer_changes_nothing_and_learns_every_linear() -> None:
    names: set[str] = set()

    def observer(seen: Sequence[str], x: HostArray) -> None:
        names.update(seen)

    given = tensors()
    plain, watched = (
        LayerStream(SPEC, TorchBackend("cpu", 1), [[5, 6, 7, 8, 9]], max_tokens=3) for _ in "ab"
    )
    for stream in (plain, watched):
        stream.embed(given)
        for number in range(len(SPEC.layers)):
            stream.run_layer(number, given, observer if stream is watched else None)
    for one, other in zip(plain.states(), watched.states(), strict=True):
        assert (one.sequence, one.position) == (other.sequence, other.position)
        assert bytes(one.values.data) == bytes(other.values.data)
    linears = {n for n, p in expected(SPEC).items() if len(p.shape) == 2 and ".layers." in n}
    assert names == linears
