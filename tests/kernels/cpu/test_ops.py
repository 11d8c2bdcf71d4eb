"""Every op against the torch reference, on every instruction set.

Dense fp32 weights, so that only the order of sums differs; quantized products are held bit for bit
in test_linear.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import Dense
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import Attention, Expert, Heads, Linear, Norm, Rope, Span
from llmrun.kernels.reference.backend import TorchBackend

Fill = Callable[[CpuArray, torch.Tensor], CpuArray]
Read = Callable[[CpuArray], torch.Tensor]
MAX_TOKENS = 320


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def host(values: torch.Tensor) -> HostArray:
    raw = memoryview(bytearray(values.contiguous().numpy().tobytes()))
    return HostArray(DType.F32, tuple(values.shape), raw)


class Both:
    """The same op on both backends, from the same numbers."""

    def __init__(self, cpu: CpuBackend, fill: Fill, read: Read) -> None:
        self.cpu, self.fill, self.read = cpu, fill, read
        self.torch = TorchBackend("cpu", 1)
        self.sides: tuple[Any, Any] = (self.cpu, self.torch)

    def array(self, *shape: int, seed: int, rows: int | None = None) -> tuple[Any, Any]:
        values = randn(*shape, seed=seed)
        held = torch.full(shape, float("nan"))
        held[: rows or shape[0]] = values[: rows or shape[0]]
        return self.fill(self.cpu.empty(shape), values[: rows or shape[0]]), held

    def linear(self, n: int, k: int, seed: int, bias: bool = False) -> tuple[Linear, Linear]:
        form = Dense(host(0.2 * randn(n, k, seed=seed)))
        add = host(randn(n, seed=seed + 1))
        pairs = [(s.weight(form), s.vector(add) if bias else None) for s in self.sides]
        return Linear(*pairs[0]), Linear(*pairs[1])

    def norm(self, n: int, seed: int, offset: float = 0.0) -> tuple[Norm, Norm]:
        gamma = host(randn(n, seed=seed))
        made = [Norm(side.vector(gamma), 1e-5, offset) for side in self.sides]
        return made[0], made[1]

    def step(
        self, spans: Sequence[Span], rows: Sequence[int] = (), ids: Sequence[int] | None = None
    ) -> tuple[Any, Any]:
        n = sum(span.count for span in spans)
        steps = [side.step(MAX_TOKENS) for side in self.sides]
        for step in steps:
            step.set(ids or list(range(n)), spans, rows)
        return steps[0], steps[1]

    def same(self, pair: tuple[CpuArray, torch.Tensor], rows: int, tolerance: float = 2e-5) -> None:
        got = self.read(pair[0])
        want = pair[1]
        scale = want[:rows].abs().max()
        assert (got[:rows] - want[:rows]).abs().max() <= tolerance * scale
        assert got[rows:].isnan().all()  # nothing is written behind the rows of the step


@pytest.fixture
def both(cpu: CpuBackend, fill: Fill, read: Read) -> Both:
    return Both(cpu, fill, read)


def one(n: int, position: int = 0) -> list[Span]:
    return [Span(0, 0, n, position)]


TOKENS = (1, 5, 9, 40)


@pytest.mark.parametrize("n", TOKENS)
def test_embed(both: Both, n: int) -> None:
    table = both.linear(50, 48, seed=1)
    ids = [(7 * i) % 50 for i in range(n)]
    h = both.array(MAX_TOKENS, 48, seed=0, rows=1)
    for side, step, weight, out in zip(
        both.sides, both.step(one(n), ids=ids), table, h, strict=True
    ):
        side.embed(step, weight.weight, 0.5, out)
    both.same(h, n, 0)


@pytest.mark.parametrize("n", TOKENS)
def test_norm_linear(both: Both, n: int) -> None:
    h, y = both.array(MAX_TOKENS, 48, seed=1, rows=n), both.array(MAX_TOKENS, 57, seed=2, rows=1)
    norm = both.norm(48, seed=3, offset=1.0)
    linears = [both.linear(rows, 48, seed=rows, bias=rows == 33) for rows in (33, 12, 12)]
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n)), strict=True)):
        side.norm_linear(step, h[i], norm[i], [pair[i] for pair in linears], y[i])
    both.same(y, n)


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("n", TOKENS)
def test_linear_add(both: Both, n: int, post: bool) -> None:
    x, h = both.array(MAX_TOKENS, 64, seed=1, rows=n), both.array(MAX_TOKENS, 40, seed=2, rows=n)
    linear, norm = both.linear(40, 64, seed=3, bias=True), both.norm(40, seed=5)
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n)), strict=True)):
        side.linear_add(step, x[i], linear[i], norm[i] if post else None, h[i])
    both.same(h, n)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("n", TOKENS)
def test_norm_gate_up(both: Both, n: int, activation: str) -> None:
    h, a = both.array(MAX_TOKENS, 48, seed=1, rows=n), both.array(MAX_TOKENS, 72, seed=2, rows=1)
    norm = both.norm(48, seed=3)
    gate, up = both.linear(72, 48, seed=4, bias=True), both.linear(72, 48, seed=6)
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n)), strict=True)):
        side.norm_gate_up(step, h[i], norm[i], gate[i], up[i], activation, a[i])
    both.same(a, n)


@pytest.mark.parametrize("n_rows", [1, 3, 16])
def test_norm_head(both: Both, n_rows: int) -> None:
    h, logits = both.array(MAX_TOKENS, 48, seed=1), both.array(16, 100, seed=2, rows=1)
    norm, head = both.norm(48, seed=3), both.linear(100, 48, seed=4)
    rows = [(5 * i) % 40 for i in range(n_rows)]
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(40), rows), strict=True)):
        side.norm_head(step, h[i], norm[i], head[i], 0.25, logits[i])
    both.same(logits, n_rows)


SPANS = {
    "token": [Span(0, 0, 1, 0)],
    "later token": [Span(1, 0, 1, 290)],
    "draft": [Span(0, 0, 5, 260)],
    "prompt": [Span(0, 0, 70, 0)],
    "second chunk": [Span(1, 0, 64, 130)],
    "batch": [Span(1, 0, 1, 17), Span(0, 1, 1, 300), Span(2, 2, 1, 0)],
    "mixed": [Span(2, 0, 33, 5), Span(0, 33, 1, 64), Span(1, 34, 9, 250)],
}
HEADS = {
    "gqa": Heads(6, 2, 64),
    "mha": Heads(2, 2, 80),
    "g7": Heads(7, 1, 128),
    "wide": Heads(2, 1, 256),
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("variant", ["plain", "window", "softcap", "sinks", "f16"])
def test_attention_with_its_cache(
    both: Both, spans: list[Span], heads: Heads, variant: str
) -> None:
    n = sum(span.count for span in spans)
    width = (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim
    kv = [side.kv_layer(3, 400, heads, "f16" if variant == "f16" else "f32") for side in both.sides]
    rope = Rope(tuple(10000.0 ** (-2 * i / 64) for i in range(24)), attention_factor=1.1)
    norms = both.norm(heads.head_dim, seed=8) if variant == "window" else (None, None)
    sinks = [side.vector(host(randn(heads.n_heads, seed=9))) for side in both.sides]
    attention = [
        Attention(
            heads,
            heads.head_dim**-0.5,
            window=100 if variant == "window" else None,
            softcap=3.0 if variant == "softcap" else None,
            sinks=sink if variant == "sinks" else None,
        )
        for sink in sinks
    ]
    # What stands before the spans, in one piece for each slot.
    for span in spans:
        for start in range(0, span.position, MAX_TOKENS):
            count = min(MAX_TOKENS, span.position - start)
            before = both.step([Span(span.slot, 0, count, start)])
            y = both.array(MAX_TOKENS, width, seed=100 + span.slot)
            for i, side in enumerate(both.sides):
                side.rope_append(before[i], y[i], heads, rope, norms[i], norms[i], kv[i])
    y, o = (
        both.array(MAX_TOKENS, width, seed=1),
        both.array(MAX_TOKENS, heads.n_heads * heads.head_dim, seed=2, rows=1),
    )
    for i, (side, step) in enumerate(zip(both.sides, both.step(spans), strict=True)):
        side.rope_append(step, y[i], heads, rope, norms[i], norms[i], kv[i])
        side.attend(step, y[i], attention[i], kv[i], o[i])
    both.same(o, n, 5e-4 if variant == "f16" else 2e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("n", TOKENS)
def test_moe_add(both: Both, n: int, normalize: bool) -> None:
    h, norm = both.array(MAX_TOKENS, 32, seed=1, rows=n), both.norm(32, seed=2)
    router = both.linear(8, 32, seed=3)
    parts = [
        [
            both.linear(48, 32, seed=10 + e),
            both.linear(48, 32, seed=30 + e),
            both.linear(32, 48, seed=50 + e),
        ]
        for e in range(8)
    ]
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n)), strict=True)):
        experts = [Expert(*(part[i] for part in expert)) for expert in parts]
        side.moe_add(step, h[i], norm[i], router[i], experts, 2, normalize, "silu")
    both.same(h, n)


def test_kv_copy(both: Both) -> None:
    heads = Heads(2, 1, 64)
    y = both.array(MAX_TOKENS, 256, seed=1)
    kv = [side.kv_layer(2, 50, heads, "f16") for side in both.sides]
    o = both.array(MAX_TOKENS, 128, seed=2, rows=1)
    filled, after = both.step(one(20)), both.step([Span(1, 0, 1, 20)])
    for i, side in enumerate(both.sides):
        side.rope_append(filled[i], y[i], heads, None, None, None, kv[i])
        side.kv_copy(kv[i], 0, 1, 20)
        side.rope_append(after[i], y[i], heads, None, None, None, kv[i])
        side.attend(after[i], y[i], Attention(heads, 0.125), kv[i], o[i])
    both.same(o, 1, 5e-4)
