"""Same bits whatever the threads, the replay, the batch and the cache (complaint 18).

A whole tiny decoder, every kind of weight, every instruction set. Ids fed up to 8 at a time take
the way of decoding; longer steps tile the attention and differ from it in the last bits.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.ops import Linear, Norm, Span

Tiny = ModuleType
Fill = Callable[[CpuArray, torch.Tensor], CpuArray]
Read = Callable[[CpuArray], torch.Tensor]

KINDS = ("int4 g32", "int4 g32 +min", "int4 g64 +zero", "int8 g128", "f16", "lut4 g64", "iq4 g32")
CHUNKS = [270, 33, *[1] * 6, 4, 8]
"""A prompt in two chunks that ends behind the first 256 keys, decoding, and drafts to verify."""


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tiny: Tiny) -> Any:
    assert request.param in tiny.KINDS
    return tiny.forms(request.param)


@pytest.fixture(scope="module")
def text(tiny: Tiny) -> list[int]:
    ids: list[int] = tiny.ids(sum(CHUNKS))
    return ids


def test_18_threads_and_replay_change_no_bit(
    tiny: Tiny, made: Any, text: list[int], isa: str
) -> None:
    eager = tiny.decoder(made, CpuBackend(1, isa=isa, replay=False))
    want = tiny.run(eager, text, CHUNKS)
    assert len(set(want)) == len(text)  # nothing is constant
    for threads in (1, 2, 4):
        model = tiny.decoder(made, CpuBackend(threads, isa=isa))
        assert tiny.run(model, text, CHUNKS) == want, f"{threads} threads, replayed"
    uneven = CpuBackend(4, decode_threads=1, isa=isa, huge_pages=False)
    assert tiny.run(tiny.decoder(made, uneven), text, CHUNKS) == want


def test_18_drafts_of_up_to_8_equal_single_tokens(
    tiny: Tiny, made: Any, text: list[int], isa: str
) -> None:
    model = tiny.decoder(made, CpuBackend(2, isa=isa))
    fed = text[:300]  # over 256 keys
    singles = tiny.run(model, fed, [1] * 300)
    for chunks in ([8] * 37 + [4], [2, 3, 5, 7, 8] * 12):
        assert tiny.run(model, fed, chunks) == singles


def test_18_sequences_decoded_together_equal_each_alone(
    tiny: Tiny, made: Any, text: list[int], isa: str
) -> None:
    model = tiny.decoder(made, CpuBackend(2, isa=isa))
    prompts = [text[:5], text[7:40], text[100:103]]
    together = tiny.cache(model, 3)
    alone = []
    for slot, prompt in enumerate(prompts):
        alone.append(tiny.run(model, [*prompt, *text[:4]], [len(prompt), 1, 1, 1, 1])[-4:])
        tiny.logits(model, [Span(slot, 0, len(prompt), 0)], prompt, together)
    for number, token_id in enumerate(text[:4]):
        spans = [Span(slot, slot, 1, len(prompts[slot]) + number) for slot in range(3)]
        rows = tiny.logits(model, spans, [token_id] * 3, together)
        assert rows == [alone[slot][number] for slot in range(3)]


def test_18_forked_and_reused_caches_give_the_same(
    tiny: Tiny, made: Any, text: list[int], isa: str
) -> None:
    model = tiny.decoder(made, CpuBackend(2, isa=isa))
    prompt, rest = text[:30], text[30:36]
    fresh = tiny.run(model, [*prompt, *rest], [30, *[1] * 6])[-6:]
    cache = tiny.cache(model, 2)
    tiny.run(model, [*prompt, *text[50:60]], [30, *[1] * 10], cache)
    cache.truncate(0, 30)
    cache.fork(0, 1)
    assert tiny.run(model, rest, [1] * 6, cache) == fresh
    for number, token_id in enumerate(rest):
        span = Span(1, 0, 1, 30 + number)
        assert tiny.logits(model, [span], [token_id], cache) == [fresh[number]]
    assert cache.reuse(0, [*prompt, *rest[:3], rest[3] + 1, 5]) == 33
    assert tiny.run(model, rest[3:], [1] * 3, cache) == fresh[3:]


# --- rows of a product ----------------------------------------------------------------------------


class Ops:
    """Each op with a weight on its own: activations of M tokens in, M rows of bits out."""

    def __init__(self, tiny: Tiny, cpu: CpuBackend, fill: Fill, read: Read, kind: str) -> None:
        self.cpu, self.fill, self.read = cpu, fill, read
        seeds = iter(range(100))

        def linear(n: int, k: int) -> Linear:
            return Linear(cpu.weight(tiny.weight(kind, n, k, next(seeds))))

        self.qkv = [linear(n, 128) for n in (83, 32, 16)]
        self.gate, self.up, self.out = linear(144, 128), linear(144, 128), linear(96, 256)
        self.head = linear(333, 128)
        self.norm = Norm(cpu.vector(tiny.gamma(128, 1)), 1e-5)

    def rows(self, op: str, x: torch.Tensor) -> list[torch.Tensor]:
        """The op on some tokens."""
        n = len(x)
        step = self.cpu.step(64)
        step.set([0] * n, [Span(0, 0, n, 0)], list(range(n)))
        sizes = {"norm_linear": 131, "norm_gate_up": 144, "norm_head": 333, "linear_add": 96}
        wide = op == "linear_add"
        h = self.fill(self.cpu.empty((64, 256 if wide else 128)), x if wide else x[:, :128])
        out = self.fill(self.cpu.empty((64, sizes[op])), torch.ones(n, sizes[op]))
        if op == "norm_linear":
            self.cpu.norm_linear(step, h, self.norm, self.qkv, out)
        elif op == "norm_gate_up":
            self.cpu.norm_gate_up(step, h, self.norm, self.gate, self.up, "silu", out)
        elif op == "norm_head":
            self.cpu.norm_head(step, h, self.norm, self.head, 1.0, out)
        else:
            self.cpu.linear_add(step, h, self.out, None, out)
        values = self.read(out)
        assert values[:n].isfinite().all()
        assert values[n:].isnan().all()
        return list(values[:n])


@pytest.fixture(params=KINDS)
def ops(request: pytest.FixtureRequest, tiny: Tiny, cpu: CpuBackend, fill: Fill, read: Read) -> Ops:
    return Ops(tiny, cpu, fill, read, request.param)


@pytest.mark.parametrize("op", ["norm_linear", "norm_gate_up", "norm_head", "linear_add"])
def test_18_a_row_of_a_batch_equals_the_row_alone(ops: Ops, op: str) -> None:
    x = torch.randn((33, 256), generator=torch.Generator().manual_seed(3))
    x[::3, 70] *= 40  # its group stands out and is refined
    alone = [ops.rows(op, row[None])[0] for row in x]
    for tokens in range(2, 34):
        batch = ops.rows(op, x[:tokens])
        assert all(torch.equal(a, b) for a, b in zip(batch, alone, strict=False)), tokens
