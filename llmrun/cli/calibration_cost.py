"""How long a model would take to read a calibration text here, before it is asked to."""

import time

from llmrun.kernels.forms import Dense
from llmrun.kernels.host import DType, empty
from llmrun.kernels.ops import Backend, Linear, Span
from llmrun.model.parameters import expected, layer_of
from llmrun.model.spec import DecoderSpec
from llmrun.quant.moments import gram_blocks
from llmrun.quant.roles import QUANTIZED_ROLES, Role

PROBE_WIDTH, PROBE_TOKENS, PROBE_REPEATS = 2048, 256, 3

PASSES = 2
"""Each layer runs as it was, and quantized."""

OVERHEAD = 1.3
"""Attention, norms, packing of the weights, moments of the inputs: a share on top (measured on a
model of 135 million weights, where it is largest)."""

SUMMING, WORKING = 1.5, 5
"""So many times as long as an operation of a product takes one of summing products of columns, and
one of factoring (fp64) or of moving errors on (in the written order, nothing fused). Measured on 2
cores of a server: predicted 14 s and 165 s for models of 135 million and 1.5 billion weights, of
which their conversion to int4 took 18 s and 152 s in all."""


def dense_rate(backend: Backend) -> float:
    """FLOP per second of a product with bf16 weights, measured now in a moment."""
    n = PROBE_WIDTH
    linear = Linear(backend.weight(Dense(empty(DType.BF16, (n, n)))))
    x, h = backend.empty((PROBE_TOKENS, n)), backend.empty((PROBE_TOKENS, n))
    step = backend.step(PROBE_TOKENS)
    step.set([0] * PROBE_TOKENS, [Span(0, 0, PROBE_TOKENS, 0)], [])
    best = float("inf")
    for _ in range(PROBE_REPEATS + 1):  # the first packs the weight
        start = time.perf_counter()
        backend.linear_add(step, x, linear, None, h)
        backend.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * n * n * PROBE_TOKENS / best


def predicted_seconds(spec: DecoderSpec, n_tokens: int, rate: float) -> float:
    """Seconds to push tokens through all layers, as they are and quantized, at a rate, and to
    make errors good by what they showed."""
    running = OVERHEAD * PASSES * 2 * n_tokens * _active(spec)
    return (running + _compensating(spec, n_tokens)) / rate


def _compensating(spec: DecoderSpec, n_tokens: int) -> float:
    """Operations of summing products of columns, factoring the blocks and moving errors on."""
    inputs: dict[object, int] = {}
    moving = 0
    for name, parameter in expected(spec).items():
        if parameter.role not in QUANTIZED_ROLES:
            continue
        n, k = parameter.shape
        moving += sum(n * len(block) ** 2 for block in gram_blocks(k))
        # What reads the same inputs has one role; of experts, each has its own.
        own = name.replace("gate_proj", "up_proj") if parameter.role is Role.EXPERTS else None
        inputs[layer_of(name), parameter.role, own] = k
    blocks = [len(block) for k in inputs.values() for block in gram_blocks(k)]
    summing = n_tokens * sum(size**2 for size in blocks)
    return SUMMING * summing + WORKING * (sum(size**3 for size in blocks) + moving)


def _active(spec: DecoderSpec) -> int:
    """Weights of the layers' linears that a token passes."""
    every = experts = 0
    for parameter in expected(spec).values():
        if parameter.role is Role.EXPERTS:
            experts += parameter.shape[0] * parameter.shape[1]
        elif parameter.role in QUANTIZED_ROLES:
            every += parameter.shape[0] * parameter.shape[1]
    if spec.mixture is not None:
        every += experts * spec.mixture.top_k // spec.mixture.n_experts
    return every
