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
from llmrun.kernels.forms import Dense, GroupInt
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

    def norm(self, n: int, seed: int, *, beta: bool = False, **more: Any) -> tuple[Norm, Norm]:
        gamma, last = host(randn(n, seed=seed)), host(randn(n, seed=seed + 1))
        made = [
            Norm(side.vector(gamma), 1e-5, beta=side.vector(last) if beta else None, **more)
            for side in self.sides
        ]
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


NORMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "rms": {"offset": 1.0},
    "rms beta": {"offset": 1.0, "beta": True},
    "layer": {"centered": True},
    "layer beta": {"centered": True, "beta": True},
}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("n", TOKENS)
def test_norm_linear(both: Both, n: int, kind: str) -> None:
    width = 109  # ends within a vector of every instruction set
    h, y = both.array(MAX_TOKENS, width, seed=1, rows=n), both.array(MAX_TOKENS, 57, seed=2, rows=1)
    for part in h:
        moved = (both.read(part) if isinstance(part, CpuArray) else part) + 3.0
        both.fill(part, moved) if isinstance(part, CpuArray) else part.copy_(moved)
    attributes = NORMS[kind]
    norm = (None, None) if attributes is None else both.norm(width, seed=3, **attributes)
    linears = [both.linear(rows, width, seed=rows, bias=rows == 33) for rows in (33, 12, 12)]
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n)), strict=True)):
        side.norm_linear(step, h[i], norm[i], [pair[i] for pair in linears], y[i])
    both.same(y, n)


@pytest.mark.parametrize(
    ("post", "scale"), [("none", 1.0), ("none", 0.22), ("rms", 1.0), ("layer beta", 0.22)]
)
@pytest.mark.parametrize("n", TOKENS)
def test_linear_add(both: Both, n: int, post: str, scale: float) -> None:
    x, h = both.array(MAX_TOKENS, 64, seed=1, rows=n), both.array(MAX_TOKENS, 43, seed=2, rows=n)
    attributes = NORMS[post]
    linear = both.linear(43, 64, seed=3, bias=True)
    norm = (None, None) if attributes is None else both.norm(43, seed=5, **attributes)
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n)), strict=True)):
        side.linear_add(step, x[i], linear[i], norm[i], h[i], scale)
    both.same(h, n)


@pytest.mark.parametrize(
    ("activation", "gated", "normed"),
    [
        ("silu", True, True),
        ("gelu_tanh", True, False),
        ("swiglu_clamped", True, True),
        ("silu", False, False),
        ("gelu_tanh", False, True),
    ],
)
@pytest.mark.parametrize("n", TOKENS)
def test_norm_gate_up(both: Both, n: int, activation: str, gated: bool, normed: bool) -> None:
    h, a = both.array(MAX_TOKENS, 48, seed=1, rows=n), both.array(MAX_TOKENS, 75, seed=2, rows=1)
    norm = both.norm(48, seed=3, offset=4.0) if normed else (None, None)  # so that clamps are met
    gate = both.linear(75, 48, seed=4, bias=True) if gated else (None, None)
    up = both.linear(75, 48, seed=6, bias=not gated)
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n)), strict=True)):
        side.norm_gate_up(step, h[i], norm[i], gate[i], up[i], activation, a[i])
    both.same(a, n)


def test_the_clamped_activation_needs_a_gate(both: Both) -> None:
    (h, _), (a, _) = both.array(2, 48, seed=1), both.array(2, 75, seed=2)
    up, _ = both.linear(75, 48, seed=6)
    with pytest.raises(ValueError, match="swiglu_clamped"):
        both.cpu.norm_gate_up(both.cpu.step(2), h, None, None, up, "swiglu_clamped", a)


def test_the_clamped_activation_keeps_nan(both: Both) -> None:
    (h, _), (a, _) = both.array(3, 48, seed=1), both.array(3, 75, seed=2)
    both.fill(h, torch.cat((randn(48), torch.full((48,), torch.nan), 1e4 * randn(48))))
    (gate, _), (up, _) = both.linear(75, 48, seed=4), both.linear(75, 48, seed=6)
    step, _ = both.step(one(3))
    both.cpu.norm_gate_up(step, h, None, gate, up, "swiglu_clamped", a)
    got = both.read(a)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "scale", "softcap"),
    [("rms", 1.0, None), ("rms", 0.25, None), ("layer beta", 1.0, 2.0), ("rms", 0.25, 0.5)],
)
@pytest.mark.parametrize("n_rows", [1, 3, 16])
def test_norm_head(both: Both, n_rows: int, kind: str, scale: float, softcap: float | None) -> None:
    h, logits = both.array(MAX_TOKENS, 48, seed=1), both.array(16, 100, seed=2, rows=1)
    norm, head = both.norm(48, seed=3, **NORMS[kind] or {}), both.linear(100, 48, seed=4)
    rows = [(5 * i) % 40 for i in range(n_rows)]
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(40), rows), strict=True)):
        side.norm_head(step, h[i], norm[i], head[i], scale, logits[i], softcap)
    both.same(logits, n_rows)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("n", [1, 40])
def test_large_activations_without_a_norm(both: Both, n: int, kind: str) -> None:
    # A residual stream of Gemma has values in the thousands, and single ones far above.
    bits = int(kind[3:])
    width = 128 * bits // 8
    raw = torch.randint(256, (40, width), dtype=torch.uint8).numpy().tobytes()
    codes = HostArray(DType.U8, (40, width), memoryview(bytearray(raw)))
    form = GroupInt(bits, 32, codes, host(0.5 + randn(40, 4).abs()), None, (40, 128))
    values = 1e4 * randn(n, 128, seed=1)
    values[:, 5] = 3e6
    y = both.array(n, 40, seed=2)
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n)), strict=True)):
        h = both.fill(side.empty((n, 128)), values) if i == 0 else values
        side.norm_linear(step, h, None, [Linear(side.weight(form))], y[i])
    both.same(y, n, 2e-3)


@pytest.mark.parametrize(
    ("kind", "n_freq"), [("none", 1), ("head", 3), ("whole", 12), ("none", 40)]
)
@pytest.mark.parametrize("n", [1, 30])
def test_rope_append(both: Both, n: int, kind: str, n_freq: int) -> None:
    heads = Heads(6, 3, 80)
    kv = [side.kv_layer(1, 64, heads, "f32") for side in both.sides]
    rope = Rope(tuple(0.7**i for i in range(n_freq)), attention_factor=1.2)
    norms: list[Any] = [(None, None), (None, None)]
    if kind != "none":
        whole = kind == "whole"
        sizes = (heads.n_heads * 80, heads.n_kv_heads * 80) if whole else (80, 80)
        norms = [both.norm(size, seed=size, whole=whole, offset=0.5, beta=True) for size in sizes]
    o = both.array(MAX_TOKENS, heads.n_heads * 80, seed=2, rows=1)
    for count, position in ((20, 0), (n, 20)):
        y = both.array(MAX_TOKENS, 12 * 80, seed=position, rows=count)
        steps = both.step(one(count, position))
        for i, (side, step) in enumerate(zip(both.sides, steps, strict=True)):
            side.rope_append(step, y[i], heads, rope, norms[0][i], norms[1][i], kv[i])
        both.same(y, count)
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n, 20)), strict=True)):
        side.attend(step, y[i], Attention(heads, 0.1), kv[i], o[i])
    both.same(o, n)


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
RARE_HEADS = {
    "24": Heads(6, 6, 24),
    "96": Heads(10, 2, 96),
    "g16": Heads(16, 1, 72),
    "512": Heads(3, 1, 512),
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("variant", ["plain", "window", "softcap", "sinks", "f16"])
def test_attention_with_its_cache(
    both: Both, spans: list[Span], heads: Heads, variant: str
) -> None:
    check_attention(both, spans, heads, [variant])


@pytest.mark.parametrize("name", ["draft", "mixed"])
@pytest.mark.parametrize("heads", RARE_HEADS.values(), ids=RARE_HEADS)
@pytest.mark.parametrize("variants", [["f16"], ["window", "softcap", "sinks"]], ids=["f16", "all"])
def test_attention_of_rare_heads(both: Both, name: str, heads: Heads, variants: list[str]) -> None:
    check_attention(both, SPANS[name], heads, variants)


def check_attention(both: Both, spans: list[Span], heads: Heads, variants: Sequence[str]) -> None:
    n = sum(span.count for span in spans)
    width = (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim
    form = "f16" if "f16" in variants else "f32"
    kv = [side.kv_layer(3, 400, heads, form) for side in both.sides]
    n_freq = min(24, heads.head_dim // 2)
    rope = Rope(tuple(10000.0 ** (-2 * i / 64) for i in range(n_freq)), attention_factor=1.1)
    norms = both.norm(heads.head_dim, seed=8) if "window" in variants else (None, None)
    sinks = [side.vector(host(randn(heads.n_heads, seed=9))) for side in both.sides]
    attention = [
        Attention(
            heads,
            heads.head_dim**-0.5,
            window=100 if "window" in variants else None,
            softcap=3.0 if "softcap" in variants else None,
            sinks=sink if "sinks" in variants else None,
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
    both.same(o, n, 5e-4 if form == "f16" else 2e-5)


@pytest.mark.parametrize("activation", ["silu", "swiglu_clamped"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("n", TOKENS)
def test_moe_add(both: Both, n: int, normalize: bool, activation: str) -> None:
    rare = activation != "silu"
    h, norm = both.array(MAX_TOKENS, 33, seed=1, rows=n), both.norm(33, seed=2, offset=4.0 * rare)
    router = both.linear(8, 33, seed=3, bias=rare)
    parts = [
        [
            both.linear(50, 33, seed=10 + e, bias=rare),
            both.linear(50, 33, seed=30 + e, bias=rare),
            both.linear(33, 50, seed=50 + e, bias=rare),
        ]
        for e in range(8)
    ]
    for i, (side, step) in enumerate(zip(both.sides, both.step(one(n)), strict=True)):
        experts = [Expert(*(part[i] for part in expert)) for expert in parts]
        scale = 0.3 if rare else 1.0
        side.moe_add(step, h[i], norm[i], router[i], experts, 2, normalize, activation, scale)
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
