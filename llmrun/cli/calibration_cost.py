"""How long a model would take to read a calibration text here, before it is asked to."""

import time

from llmrun.kernels.forms import Dense
from llmrun.kernels.host import DType, empty
from llmrun.kernels.ops import Backend, Linear, Span
from llmrun.model.parameters import expected
from llmrun.model.spec import DecoderSpec
from llmrun.quant.roles import QUANTIZED_ROLES, Role

PROBE_WIDTH, PROBE_TOKENS, PROBE_REPEATS = 2048, 256, 3

PASSES = 2
"""Each layer runs as it was, and quantized."""

OVERHEAD = 1.3
"""Attention, norms, packing of the weights, moments of the inputs: a share on top (measured on a
model of 135 million weights, where it is largest)."""


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
    """Seconds to push tokens through all layers, as they are and quantized, at a rate."""
    return OVERHEAD * PASSES * 2 * n_tokens * _active(spec) / rate


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
