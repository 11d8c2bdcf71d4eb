"""Complaints about CPU inference that no other file holds; docs/cpu-complaints.md lists all."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmrun.errors import UnavailableError
from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.forms import Dense
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import Linear, Span
from llmrun.kernels.reference.backend import TorchBackend

ROOT = Path(__file__).resolve().parents[3]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "scaled_dot_product")
HALF = (torch.float16, torch.bfloat16)


class Products(TorchDispatchMode):
    """Notes the element types of every product that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = str(func).split(".")[1].strip("_")
        if name.startswith(PRODUCTS):
            self.types |= {a.dtype for a in args if isinstance(a, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["f16", "int4 g32", "int8 g128", "lut4 g64"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_10_the_torch_kernels_never_multiply_in_half_precision(
    tiny: ModuleType, kind: str, tokens: int
) -> None:
    # On processors without AVX512 torch does that 44 to 500 times slower than in fp32.
    model = tiny.decoder(tiny.forms(kind), TorchBackend("cpu", 1))
    cache = tiny.cache(model)
    with Products() as products:
        span = Span(0, 0, tokens, 0)
        model.forward(tiny.ids(tokens), [span], cache.layers, [tokens - 1])
    assert products.types == {torch.float32}


def test_10_the_check_sees_half_precision() -> None:
    half = torch.ones(4, 4, dtype=torch.float16)
    with Products() as products:
        _ = half @ half
    assert products.types & set(HALF)


native = pytest.mark.skipif(problem() is not None, reason="no native library")


@native
def test_12_the_wanted_instruction_set_is_taken_or_refused(isas: list[str]) -> None:
    assert [CpuBackend(1, isa=isa).isa for isa in isas] == isas
    assert CpuBackend(1).isa == isas[-1]
    with pytest.raises(UnavailableError, match="'avx9'"):
        CpuBackend(1, isa="avx9")


@native
def test_15_subnormal_numbers_count_as_zero_on_every_thread(
    cpu: CpuBackend,
    fill: Callable[[CpuArray, torch.Tensor], CpuArray],
    read: Callable[[CpuArray], torch.Tensor],
) -> None:
    # Arithmetic with them takes some 100 cycles each; every row here would be made of them.
    n, k = 2048, 32
    values = torch.full((n, k), 1e-40)
    raw = memoryview(bytearray(values.numpy().tobytes()))
    weight = cpu.weight(Dense(HostArray(DType.F32, (n, k), raw)))
    step, x = cpu.step(1), fill(cpu.empty((1, k)), torch.ones(1, k))
    step.set([0], [Span(0, 0, 1, 0)], [])
    for _ in range(20):  # sooner or later both threads take part
        h = fill(cpu.empty((1, n)), torch.zeros(1, n))
        cpu.linear_add(step, x, Linear(weight), None, h)
        assert (read(h) == 0).all()


@native
def test_15_the_callers_arithmetic_keeps_its_subnormal_numbers(tiny: ModuleType) -> None:
    least = float.fromhex("0x1p-1074")
    tiny.run(tiny.decoder(tiny.forms("f16"), CpuBackend(2)), tiny.ids(9), [9])
    assert sum([least, least]) / 2 == least


def test_every_complaint_has_a_row_and_every_test_of_a_row_is_there() -> None:
    text = (ROOT / "docs/cpu-complaints.md").read_text(encoding="utf-8")
    lines = (line.split("|") for line in text.splitlines())
    rows = [(int(line[1]), line[3]) for line in lines if line[1:] and line[1].strip().isdigit()]
    assert [number for number, _ in rows] == list(range(1, 19))
    for number, held in rows:
        assert "test" in held, number
        source = ""
        for word in held.split("`")[1::2]:
            if word.startswith("test_") and word.endswith(".py"):
                files = (ROOT / "tests").rglob(word)
                source = "".join(file.read_text(encoding="utf-8") for file in files)
            elif word.startswith("test_"):
                assert f"def {word}(" in source, word
            elif "/" in word:
                assert (ROOT / word).exists(), word
