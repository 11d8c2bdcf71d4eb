"""A tiny decoder with random weights in any storage form.

Nothing but the product is imported, no torch either: tests run it in processes of their own, too.
"""

import math
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llmrun.engine.cache import KvCache
from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import Backend, Heads, Rope, Span
from llmrun.model.decoder import Decoder, build
from llmrun.model.parameters import expected
from llmrun.model.spec import DecoderSpec, LayerSpec, NormSpec

ROPE = Rope(tuple(10000.0 ** (-i / 16) for i in range(16)))
SPEC = DecoderSpec(
    architecture="llama",
    vocab=333,
    hidden=128,
    intermediate=256,
    heads=Heads(4, 2, 32),
    layers=(LayerSpec(ROPE), LayerSpec(ROPE, window=20), LayerSpec(ROPE)),
    norm=NormSpec(1e-5),
    activation="silu",
    attention_scale=32**-0.5,
    max_positions=1024,
    tied=False,
    qkv_bias=True,
    qk_norm="head",
)
KINDS = ("int4 g32", "int4 g32 +min", "int4 g64 +zero", "int8 g128", "f16", "lut4 g64", "iq4 g32")
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
CAPACITY = 640
MAX_TOKENS = 300

Forms = dict[str, Form]


def floats(generator: random.Random, shape: tuple[int, ...], low: float, high: float) -> HostArray:
    """Uniform numbers."""
    return f16([generator.uniform(low, high) for _ in range(math.prod(shape))], shape)


def f16(values: Sequence[float], shape: tuple[int, ...]) -> HostArray:
    """Numbers as an array of f16."""
    packed = struct.pack(f"<{len(values)}e", *values)
    return HostArray(DType.F16, shape, memoryview(bytearray(packed)))


def weight(kind: str, n: int, k: int, seed: int) -> Form:
    """A weight [n, k] whose products stay near the size of what they multiply."""
    generator = random.Random(seed)
    size = k**-0.5
    if kind == "f16":
        return Dense(floats(generator, (n, k), -1.7 * size, 1.7 * size))
    name, group = kind.split()[0], int(kind.split()[1][1:])
    bits = 8 if name == "int8" else 4
    shape = (n, k * bits // 8)
    codes = HostArray(DType.U8, shape, memoryview(bytearray(generator.randbytes(n * shape[1]))))
    if name in ("lut4", "iq4"):
        entries = IQ4 if name == "iq4" else tuple((i / 8 - 0.94) ** 3 for i in range(16))
        table = struct.pack("<16f", *entries)
        values = HostArray(DType.F32, (16,), memoryview(bytearray(table)))
        largest = max(map(abs, entries))
        scales = floats(generator, (n, k // group), size / largest, 3 * size / largest)
        return Lut16(group, codes, values, scales, (n, k))
    unit = 3.5 * size / 2**bits
    scales = floats(generator, (n, k // group), 0.5 * unit, 1.5 * unit)
    mins = None
    if "+zero" in kind:
        zeros = bytes(generator.randrange(5, 11) for _ in range(n * k // group))
        mins = HostArray(DType.U8, (n, k // group), memoryview(bytearray(zeros)))
    if "+min" in kind:
        middle = unit * 2 ** (bits - 1)
        mins = floats(generator, (n, k // group), -1.5 * middle, -0.5 * middle)
    return GroupInt(bits, group, codes, scales, mins, (n, k))


def forms(kind: str, spec: DecoderSpec = SPEC) -> Forms:
    """All parameters of a decoder, matrices of one kind."""
    made: Forms = {}
    for seed, (name, parameter) in enumerate(expected(spec).items()):
        if len(parameter.shape) == 2:
            made[name] = weight(kind, *parameter.shape, seed)
        elif name.endswith("bias"):
            made[name] = Dense(floats(random.Random(seed), parameter.shape, -0.5, 0.5))
        else:
            made[name] = Dense(gamma(parameter.shape[0], seed))
    return made


def gamma(n: int, seed: int) -> HostArray:
    """A norm's weight that lets one column stand out, as in real models."""
    generator = random.Random(seed)
    values = [generator.uniform(0.5, 1.5) for _ in range(n)]
    values[40 % n] *= 30
    return f16(values, (n,))


def decoder(made: Forms, backend: Any, max_tokens: int = MAX_TOKENS) -> Decoder:
    """A decoder whose every row of a step may have logits."""
    bound: Backend = backend
    return build(SPEC, made.items(), bound, max_tokens=max_tokens, max_rows=max_tokens)


def cache(model: Decoder, n_slots: int = 1) -> KvCache:
    """An empty cache."""
    return KvCache(model.backend, SPEC, n_slots, CAPACITY)


def ids(count: int, seed: int = 0) -> list[int]:
    """Ids of a text."""
    return [random.Random(seed + 1000 * i).randrange(SPEC.vocab) for i in range(count)]


def logits(model: Decoder, spans: Sequence[Span], fed: Sequence[int], kv: KvCache) -> list[bytes]:
    """One step: the bits of the logits of all rows."""
    array = model.forward(fed, spans, kv.layers, list(range(len(fed))))
    assert array is not None
    host = model.backend.to_host(array, len(fed))
    row = host.nbytes // len(fed)
    return [bytes(host.data[i * row : (i + 1) * row]) for i in range(len(fed))]


def run(
    model: Decoder, fed: Sequence[int], chunks: Iterable[int], kv: KvCache | None = None
) -> list[bytes]:
    """Feed ids to slot 0 in chunks, behind what it holds; the bits of the logits of every id."""
    kv = kv or cache(model)
    return [row for step in _steps(model, fed, chunks, kv) for row in step]


def _steps(
    model: Decoder, fed: Sequence[int], chunks: Iterable[int], kv: KvCache
) -> Iterator[list[bytes]]:
    start = 0
    for count in chunks:
        part = fed[start : start + count]
        yield logits(model, [Span(0, 0, count, kv.length(0))], part, kv)
        kv.append(0, part)
        start += count
    assert start == len(fed)
