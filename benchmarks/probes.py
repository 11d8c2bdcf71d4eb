"""Single ops of the CPU backend, timed: products, attention, an op that does nothing.

Ops run as in a model: recorded into a program that one native call replays, so that Python's share
is next to nothing. Activations are Gaussian, as behind a norm; the values of weights do not matter.
"""

import random
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llmrun.kernels.cpu.arrays import CpuArray, CpuStep
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import Dense, Form, GroupInt
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import Attention, Heads, Linear, Span, never
from llmrun.quant.gguf_blocks import BLOCK_TYPES

N, K = 4096, 1024
"""A product's weight: as 4-bit codes it fits the second-level caches of two cores."""
F32_N = 1024
"""The dense one has fewer rows for the same reason."""

STREAMED = 640 << 20
"""Bytes of weights (or keys and values) far beyond the caches."""

HEADS = Heads(16, 8, 128)
CHUNK = 256
LEAST_S = 0.005
"""A timing covers at least so much."""


@dataclass(frozen=True)
class Rate:
    """Multiply-adds, and bytes of packed weights (or keys and values) they read."""

    mac_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Timer:
    """Times programs, the best of ``repeats``."""

    repeats: int

    def seconds(
        self, backend: CpuBackend, step: CpuStep, issue: Callable[[], None], least: float = 0.0
    ) -> float:
        """Seconds of one ``issue()`` when a program holds many of them.

        Repeats that took less than ``least`` do not count: they ran with fewer threads, as they
        do while a neighbour holds a core. Infinite if none counts.
        """
        once = self._program(backend, step, issue, 1, 0.0)
        count = max(1, int(LEAST_S / once))
        return self._program(backend, step, issue, count, least)

    def _program(
        self,
        backend: CpuBackend,
        step: CpuStep,
        issue: Callable[[], None],
        count: int,
        least: float,
    ) -> float:
        keeper = [backend.kv_layer(1, 1, Heads(1, 1, 32), "f16")]  # a program belongs to a cache

        def emit() -> Iterator[None]:
            for _ in range(count):
                issue()
            yield

        samples = []
        for _ in range(self.repeats + 2):
            start = time.perf_counter()
            backend.run_layers(step, keeper, "probe", emit, never)
            samples.append((time.perf_counter() - start) / count)
        replayed = samples[2:]  # it is recorded twice
        return min((sample for sample in replayed if sample >= least), default=float("inf"))


def product(backend: CpuBackend, timer: Timer, kind: str, width: int) -> Rate:
    """A weight in the caches times ``width`` tokens."""
    n = F32_N if kind == "f32" else N
    weight = backend.weight(_form(kind, n, K))
    step, x, h = _step(backend, width), _gaussian(backend, width, K), backend.empty((width, n))
    linear = Linear(weight)
    seconds = timer.seconds(backend, step, lambda: backend.linear_add(step, x, linear, None, h))
    return Rate(n * K * width / seconds, weight.nbytes / seconds)


def streamed(backend: CpuBackend, timer: Timer, kind: str) -> Rate:
    """One token times weights that come from memory."""
    form = _form(kind, N, K)
    linears = [Linear(backend.weight(form))]
    linears += [Linear(backend.weight(form)) for _ in range(STREAMED // linears[0].weight.nbytes)]
    step, x, h = _step(backend, 1), _gaussian(backend, 1, K), backend.empty((1, N))

    def issue() -> None:
        for linear in linears:
            backend.linear_add(step, x, linear, None, h)

    seconds = timer.seconds(backend, step, issue)
    nbytes = sum(linear.weight.nbytes for linear in linears)
    return Rate(len(linears) * N * K / seconds, nbytes / seconds)


def attend_prefill(backend: CpuBackend, timer: Timer, depth: int) -> Rate:
    """The last chunk of a prompt of ``depth`` tokens, one layer."""
    return _attend(backend, timer, depth, CHUNK, 1)


def attend_decode(backend: CpuBackend, timer: Timer, depth: int) -> Rate:
    """One token as the last of ``depth``, keys and values from memory."""
    layer_bytes = 2 * depth * HEADS.n_kv_heads * HEADS.head_dim * 2
    return _attend(backend, timer, depth, 1, -(-STREAMED // layer_bytes))


def empty_op(backend: CpuBackend, timer: Timer, least: float = 0.0) -> float:
    """Seconds of an op with next to no work: handing it out, and the barrier behind it."""
    table = backend.weight(_form("f32", 16, 32))
    step, h = _step(backend, 1), backend.empty((1, 32))
    return timer.seconds(backend, step, lambda: backend.embed(step, table, 1.0, h), least)


def _attend(backend: CpuBackend, timer: Timer, depth: int, width: int, n_layers: int) -> Rate:
    layers = [backend.kv_layer(1, depth, HEADS, "f16") for _ in range(n_layers)]
    heads = HEADS.n_heads + 2 * HEADS.n_kv_heads
    y = _gaussian(backend, CHUNK, heads * HEADS.head_dim)
    o = backend.empty((CHUNK, HEADS.n_heads * HEADS.head_dim))
    for layer in layers:
        for start in range(0, depth, CHUNK):
            filling = _step(backend, CHUNK, start)
            backend.rope_append(filling, y, HEADS, None, None, None, layer)
    step = _step(backend, width, depth - width)
    attention = Attention(HEADS, HEADS.head_dim**-0.5)

    def issue() -> None:
        for layer in layers:
            backend.attend(step, y, attention, layer, o)

    seconds = timer.seconds(backend, step, issue)
    pairs = sum(range(depth - width + 1, depth + 1)) * HEADS.n_heads * n_layers
    nbytes = n_layers * 2 * depth * HEADS.n_kv_heads * HEADS.head_dim * 2
    return Rate(2 * pairs * HEADS.head_dim / seconds, nbytes / seconds)


def _step(backend: CpuBackend, width: int, position: int = 0) -> CpuStep:
    step = backend.step(width)
    step.set([0] * width, [Span(0, 0, width, position)], [])
    return step


def _gaussian(backend: CpuBackend, rows: int, columns: int) -> CpuArray:
    chance = random.Random(0)
    values = array("f", (chance.gauss(0, 1) for _ in range(columns)))
    made = backend.empty((rows, columns))
    backend.to_host(made, rows).data[:] = memoryview(values).cast("B").tobytes() * rows
    return made


def _form(kind: str, n: int, k: int) -> Form:
    if kind == "f32":
        return Dense(_host(DType.F32, (n, k), struct.pack("<f", 0.01) * (n * k)))
    stored = BLOCK_TYPES.get(kind)
    name, *options = kind.split() if stored is None else ("int4", f"g{stored.group}")
    bits, group = int(name[-1]), int(options[0][1:])
    narrow = (n, k // group)
    codes = _host(DType.U8, (n, k * bits // 8), random.Random(0).randbytes(n * k * bits // 8))
    scales = _host(DType.F16, narrow, struct.pack("<e", 0.01) * (n * k // group))
    if stored is not None:
        return stored.form(codes, scales, None, (n, k))
    zeros = _host(DType.U8, narrow, bytes([8]) * (n * k // group))
    mins = {"+min": scales, "+zero": zeros}.get(options[-1])
    return GroupInt(bits, group, codes, scales, mins, (n, k))


def _host(dtype: DType, shape: Sequence[int], data: bytes) -> HostArray:
    return HostArray(dtype, tuple(shape), memoryview(bytearray(data)))
