"""Section ``attention``: how fast keys and values are read in decode, and multiplied in prefill."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu.bench import Bench
from gpu.compare import compare
from gpu.journal import Values
from gpu.run import Case, Run
from llmrun.kernels.gpu import attention
from llmrun.kernels.gpu.arrays import SMALL, GpuKvLayer, Prepared, Workspace
from llmrun.kernels.ops import Attention, Heads, Span

HEADS = {"8B": Heads(32, 8, 128), "1B": Heads(32, 8, 64)}
LENGTHS = (1024, 8192)
FORMS = ("f16", "int8")
TOLERANCE = {"f16": 5e-3, "int8": 3e-2}
"""int8 keys and values are themselves off by a percent."""

BACKENDS = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
)  # fmt: skip


def run(run: Run) -> None:
    """Measure decode, prefill, and beside it what torch has."""
    for case in cases(run.bench):
        run.case(case)
    if not run.bench.dry:
        for backend in BACKENDS:
            for length in LENGTHS:
                label = f"torch {backend.name.lower().removesuffix('_attention')} {length}"
                run.case(Case(label, partial(_torch, run.bench, backend, length)))


def cases(bench: Bench) -> Iterator[Case]:
    """Ours."""
    lengths = (96,) if bench.dry else LENGTHS
    for model, heads in {"tiny": Heads(2, 1, 64)}.items() if bench.dry else HEADS.items():
        for length in lengths:
            for form in FORMS:
                work = partial(_decode, bench, heads, length, form)
                warm = partial(_decode, bench, heads, length, form, warm=True)
                yield Case(f"decode {model} {length} {form}", work, warm)
            work = partial(_prefill, bench, heads, length)
            yield Case(f"prefill {model} {length}", work, work)


def _decode(bench: Bench, heads: Heads, length: int, form: str, *, warm: bool = False) -> Values:
    """One token behind ``length - 1`` others; caches in turn, so that none is near."""
    device = bench.device
    one = attention.kv_layer(1, length, heads, form, device)
    count = 1 if warm else max(1, math.ceil(bench.stream_bytes / one.nbytes))
    layers = [attention.kv_layer(1, length, heads, form, device) for _ in range(count)]
    y = _queries(heads, length, device)
    slots = torch.zeros(length, dtype=torch.int32, device=device)
    positions = torch.arange(length, dtype=torch.int32, device=device)
    for layer in layers:
        attention.rope_append(y, heads, None, None, None, positions, slots, length, layer)
    last = torch.zeros(SMALL, y.shape[1], device=device)
    last[0] = y[length - 1]
    at, slot = (torch.full((SMALL,), -1, dtype=torch.int32, device=device) for _ in range(2))
    at[0], slot[0] = length - 1, 0
    o = torch.zeros(SMALL, heads.n_heads * heads.head_dim, device=device)
    onto, work = Prepared.empty(o.shape[1], device), Workspace.empty(device)
    how = Attention(heads, heads.head_dim**-0.5)

    def call(layer: GpuKvLayer) -> None:
        attention.attend_few(last, how, at, slot, 1, layer, o, onto, work)

    call(layers[0])
    if warm:
        return {}
    error = compare(o[:1], _attended(y, how)[-1:], TOLERANCE[form])
    seconds = bench.per_call([partial(call, layer) for layer in layers])
    return {
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(one.nbytes / seconds / 1e9, 1),
        "error": float(f"{error:.2g}"),
    }


def _prefill(bench: Bench, heads: Heads, length: int) -> Values:
    device = bench.device
    layer = attention.kv_layer(1, length, heads, "f16", device)
    y = _queries(heads, length, device)
    slots = torch.zeros(length, dtype=torch.int32, device=device)
    positions = torch.arange(length, dtype=torch.int32, device=device)
    attention.rope_append(y, heads, None, None, None, positions, slots, length, layer)
    o = torch.zeros(length, heads.n_heads * heads.head_dim, device=device)
    how, spans = Attention(heads, heads.head_dim**-0.5), (Span(0, 0, length, 0),)

    def call() -> None:
        attention.attend_many(y, how, spans, layer, o)

    call()
    error = compare(o, _attended(y, how), 2 * TOLERANCE["f16"])
    seconds = bench.per_call([call], graph=False)
    return {
        "us": round(seconds * 1e6, 1),
        "tflops": round(_flops(heads, length) / seconds / 1e12, 2),
        "error": float(f"{error:.2g}"),
    }


def _torch(bench: Bench, backend: SDPBackend, length: int) -> Values:
    heads = HEADS["8B"]
    q, k, v = (
        torch.randn(1, n, length, heads.head_dim, device=bench.device, dtype=torch.bfloat16)
        for n in (heads.n_heads, heads.n_kv_heads, heads.n_kv_heads)
    )

    def call() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    try:
        with sdpa_kernel(backend):
            seconds = bench.per_call([call] * 4, graph=False)
    except RuntimeError as error:  # there is none for this card, or not with grouped heads
        return {"not served": str(error).partition("\n")[0]}
    return {
        "us": round(seconds * 1e6, 1),
        "tflops": round(_flops(heads, length) / seconds / 1e12, 2),
    }


def _flops(heads: Heads, length: int) -> float:
    return 4 * heads.n_heads * heads.head_dim * length * (length + 1) / 2


def _queries(heads: Heads, length: int, device: torch.device) -> torch.Tensor:
    """Queries, keys and values of all tokens, as the projections leave them."""
    columns = (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim
    random = torch.Generator().manual_seed(length)
    return torch.randn(length, columns, generator=random).to(device)


def _attended(y: torch.Tensor, how: Attention) -> torch.Tensor:
    """The formula, in fp32, one key/value head at a time: fp32 [T, H dh]."""
    heads, length = how.heads, y.shape[0]
    split = [heads.n_heads, heads.n_kv_heads, heads.n_kv_heads]
    q, k, v = y.view(length, sum(split), heads.head_dim).split(split, dim=1)
    later = torch.ones(length, length, dtype=torch.bool, device=y.device).triu(1)
    out = torch.empty(length, heads.n_heads, heads.head_dim, device=y.device)
    for head in range(heads.n_heads):
        shared = head * heads.n_kv_heads // heads.n_heads
        scores = (q[:, head] @ k[:, shared].T * how.scale).masked_fill_(later, -torch.inf)
        out[:, head] = torch.softmax(scores, dim=-1) @ v[:, shared]
    return out.view(length, -1)
