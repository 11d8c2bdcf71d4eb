"""The op contract: what a decoder is made of and what every backend must provide.

Shapes: T tokens of one or several sequences at once, D hidden size, H query heads, Hkv key/value
heads, dh head size, F intermediate size, R rows whose logits are wanted, V vocabulary rows.
``kernels/reference`` is the meaning of each op; a faster kernel is a claim about it, held by a
test. Rules, the same that graphs and recorded programs need: outputs go to arrays made before the
call, nothing that changes per token is baked into a call, everything that does sits in ``Step``.

Tolerance against the reference: relative error <= 1e-5 for fp32 activations, 2e-3 plus one output
rounding where a backend computes in 16 bits or quantizes activations to 8 (then it says so).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmrun.kernels.forms import Form
from llmrun.kernels.host import HostArray

Array = Any
"""A backend's own array; opaque to everything above ``kernels``."""

Interrupt = Callable[[], bool]
"""Asked between layers and steps; True ends the work."""


def never() -> bool:
    """The interrupt that does not come."""
    return False


OPS = (
    "embed",
    "norm_linear",
    "rope_append",
    "attend",
    "linear_add",
    "norm_gate_up",
    "moe_add",
    "norm_head",
    "pick",
)
"""Names of all ops, in the order a step meets them."""

WEIGHT_OPS = ("embed", "norm_linear", "linear_add", "norm_gate_up", "moe_add", "norm_head")
"""Ops that read a weight, for which the storage form matters."""


ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_clamped")
"""Activations of a gate; without one, of ``up``.

``gelu_tanh`` is GELU by the tanh formula. ``swiglu_clamped`` needs a gate: with
g = min(gate, CLAMP) and u = clip(up, -CLAMP, CLAMP) it gives g * sigmoid(CLAMP_SLOPE * g) * (u + 1)
(gpt-oss).
"""

CLAMP, CLAMP_SLOPE = 7.0, 1.702


@dataclass(frozen=True)
class Span:
    """``count`` tokens of one sequence: rows ``start ..`` of the step, cache slot ``slot``.

    The first of them stands at ``position``; with the call the slot holds ``position + count``
    tokens. Rows of a step are covered by its spans in order, without gaps.
    """

    slot: int
    start: int
    count: int
    position: int


class Step(Protocol):
    """Everything that changes from call to call, in memory the ops read."""

    n_tokens: int
    n_rows: int

    def set(self, token_ids: Sequence[int], spans: Sequence[Span], rows: Sequence[int]) -> None:
        """Describe the next call: T ids, their spans, and the R rows whose logits are wanted."""


class Weight(Protocol):
    """A weight in a backend's private layout, made from a storage form."""

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes, scales and padding included."""

    @property
    def kind(self) -> str:
        """Short name of its storage form."""


class KvLayer(Protocol):
    """Keys and values of one layer for all slots, in the backend's layout."""

    nbytes: int


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x W^T + b; ``weight`` [N, K], ``bias`` [N] or None."""

    weight: Weight
    bias: Array | None = None


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm: ``x / sqrt(mean(x^2) + eps) * (gamma + offset)``, statistics in fp32.

    ``gamma`` [K]. ``offset`` is 1 for models that store ``1 + w`` as ``w``. ``centered``: of
    ``x - mean(x)`` (LayerNorm); ``beta`` [K] is added last. ``whole``, for queries and keys: over
    all heads of a token at once (K is H dh or Hkv dh) instead of head by head (K is dh).
    """

    gamma: Array
    eps: float
    offset: float = 0.0
    centered: bool = False
    beta: Array | None = None
    whole: bool = False


@dataclass(frozen=True)
class Heads:
    """Geometry of attention: H query heads share Hkv key/value heads of size dh."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first ``2 * len(inv_freq)`` dimensions of each head.

    Pairs are (i, i + len(inv_freq)) (the half-split layout). Angles are ``position * inv_freq``
    in fp32; cosine and sine are multiplied by ``attention_factor``.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Attention:
    """Bound attributes of ``attend``.

    ``scale`` multiplies q.k; ``window`` counts the current token (None: all); ``softcap`` c gives
    ``c * tanh(score / c)``; ``sinks`` [H] is one extra logit per head that takes no value.
    """

    heads: Heads
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Array | None = None


@dataclass(frozen=True, eq=False)
class Expert:
    """One expert of a mixture: gate [F, D], up [F, D], down [D, F]."""

    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Sampling:
    """How one token is chosen. Filters run in this order: bias, mask, repeat penalty,
    temperature, top-k, top-p, min-p, draw.

    ``temperature`` 0 is greedy (ties: lowest id); ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and
    ``repeat_penalty`` 1 are off. The penalty divides positive and multiplies negative logits of
    each distinct id in the history once. ``top_logprobs`` asks for that many alternatives.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int = 0
    top_logprobs: int = 0


@dataclass(frozen=True)
class PickRequest:
    """One row to choose from.

    ``draw`` numbers the choices of one request from 0: together with the seed it makes the random
    numbers, so the same seed gives the same choice from the same logits on every backend.
    ``history`` are the ids the penalty looks at; ``vocab`` cuts padding rows off (ids below it);
    ``allowed`` limits the choice to some ids; ``bias`` adds to logits by id.
    """

    sampling: Sampling
    draw: int
    vocab: int
    history: Sequence[int] = ()
    allowed: Sequence[int] | None = None
    bias: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Pick:
    """A chosen id with its natural-log probability under the plain softmax of the logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


KV_FORMS = {"f16": 2.0, "f32": 4.0, "int8": 1 + 2 / 64}
"""Cache storage forms and their bytes per element, scales included.

``f32`` serves comparisons with other engines. ``int8``, which not every backend has, is codes with
a scale in f16 for every 64 of them along the head.
"""


@dataclass(frozen=True)
class Sizes:
    """What the memory that a decoder works in depends on: tokens of a step and rows of logits at
    most, the widths of its activations, and N x K of the ``largest`` linear in its layers."""

    max_tokens: int
    max_rows: int
    hidden: int
    intermediate: int
    vocab: int
    heads: Heads
    largest: int


class Chain(Protocol):
    """Decode steps, one id of each of some sequences, that feed on a device what they choose there.

    Nobody need know an id for the next step to be issued, so the device need not wait for the host.
    """

    @property
    def open(self) -> bool:
        """Whether steps may be issued and read: until ``close``, by whoever calls it."""

    def queue(self) -> None:
        """Issue the next step: K and V of the ids chosen last go to the cache, the next are chosen.

        One step may be issued before the one ahead of it was read. The cache must have room.
        """

    def read(self) -> list[Pick]:
        """Wait for the oldest step not read yet; what it chose, one pick per sequence.

        InternalError if a row of logits is not finite. None of its picks has ``top``.
        """

    def close(self) -> None:
        """Drop what was not read, at no cost; it may have written to the cache. May be repeated."""


class Backend(Protocol):
    """Arrays and ops of one device. Construct once per process and device; not thread-safe."""

    name: str
    device: str
    threads: int
    isa: str | None
    """The instruction set its kernels are made for; None if it does not say."""
    prefill_tokens: int
    """Tokens of a step that are worth computing together; more take memory and gain nothing."""

    # --- arrays -------------------------------------------------------------------------------
    def weight(self, form: Form) -> Weight:
        """Take over a 2-D weight. UnavailableError if no kernel serves its form."""

    def widening(self, kind: str) -> int:
        """Bits by which each weight of a storage form's kind takes more here than in its form."""

    def vector(self, host: HostArray) -> Array:
        """Take over a norm weight or bias as fp32 [N]."""

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Activation memory, fp32 (a backend may hold it in its compute dtype)."""

    def step(self, max_tokens: int) -> Step:
        """A step for at most ``max_tokens`` tokens."""

    def kv_layer(self, n_slots: int, capacity: int, heads: Heads, form: str) -> KvLayer:
        """Cache memory of one layer: ``capacity`` tokens for each slot. UnavailableError for a
        form or a head size that no kernel serves."""

    def kv_copy(self, layer: KvLayer, source: int, target: int, n_tokens: int) -> None:
        """Copy the first ``n_tokens`` of slot ``source`` to slot ``target``."""

    def to_host(self, array: Array, n_rows: int) -> HostArray:
        """The first rows of an activation array as F32 (tests, custom samplers)."""

    def load(self, array: Array, host: HostArray) -> None:
        """Write F32 [n, ...] into the first n rows of an activation array."""

    def release(self) -> None:
        """Weights taken over from now on lie apart from those before, whose memory is given back
        with the last of them that somebody holds: for models that pass through layer by layer."""

    def free_bytes(self) -> int | None:
        """Free memory of a device that has its own; None if it works in host memory."""

    def workspace_bytes(self, sizes: Sizes) -> int | None:
        """What a device with memory of its own takes beside weights and cache, at most; None if it
        works in host memory."""

    def synchronize(self) -> None:
        """Return when all issued work is done (a stamp may be taken after it)."""

    # --- running ------------------------------------------------------------------------------
    def run_layers(
        self,
        step: Step,
        kv: Sequence[KvLayer],
        key: object,
        emit: Callable[[], Iterator[None]],
        interrupt: Interrupt,
    ) -> bool:
        """Run the ops that ``emit`` issues, layer by layer; False if interrupted between two.

        ``emit`` yields after each layer. For the same ``kv`` and ``key`` it issues the same ops on
        the same arrays, whatever the step holds, so a backend may record them once and replay
        them. The result is the same bit for bit.
        """

    def chain(
        self,
        step: Step,
        kv: Sequence[KvLayer],
        key: object,
        emit: Callable[[], Iterator[None]],
        logits: Array,
        requests: Sequence[PickRequest],
    ) -> Chain | None:
        """Decode steps that feed back what they choose; None if they are not served here.

        ``step`` is set for the first of them: one token of each sequence, a row of logits of each.
        ``emit`` as in ``run_layers``; it ends with ``logits``, from which row r is chosen as
        ``requests[r]`` says; from step to step ``draw`` counts on and ``history`` grows by what was
        chosen. None in any case for ``bias``, ``allowed`` or ``top_logprobs``.
        """

    # --- ops ----------------------------------------------------------------------------------
    def embed(self, step: Step, table: Weight, scale: float, h: Array) -> None:
        """h[T, D] = table[token_ids] * scale; table [V, D] in any form."""

    def norm_linear(
        self, step: Step, h: Array, norm: Norm | None, linears: Sequence[Linear], y: Array
    ) -> None:
        """y[T, sum N] = concat_i(linears[i](norm(h))): query, key and value projections.

        ``norm`` None, here and in ``norm_gate_up``: h as it is."""

    def rope_append(
        self,
        step: Step,
        y: Array,
        heads: Heads,
        rope: Rope | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        kv: KvLayer,
    ) -> None:
        """In y[T, (H + 2 Hkv) dh]: norm and rotate queries and keys; write K and V to the cache
        at each token's position. Norms come before the rotation and are never centered."""

    def attend(self, step: Step, y: Array, attention: Attention, kv: KvLayer, o: Array) -> None:
        """o[T, H dh]: causal softmax attention of the queries in y over their slot's cache."""

    def linear_add(
        self,
        step: Step,
        x: Array,
        linear: Linear,
        post_norm: Norm | None,
        h: Array,
        scale: float = 1.0,
    ) -> None:
        """h[T, D] += scale * post_norm(linear(x)): output and down projections."""

    def norm_gate_up(
        self,
        step: Step,
        h: Array,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: str,
        a: Array,
    ) -> None:
        """a[T, F] = activation(gate(norm(h))) * up(norm(h)), one of ACTIVATIONS.

        ``gate`` None: a = activation(up(norm(h)))."""

    def moe_add(
        self,
        step: Step,
        h: Array,
        norm: Norm,
        router: Linear,
        experts: Sequence[Expert],
        top_k: int,
        normalize: bool,
        activation: str,
        scale: float = 1.0,
    ) -> None:
        """h[T, D] += scale * sum over the top_k experts of p * expert(norm(h)), where
        p = softmax(router(norm(h))).

        ``normalize`` divides the chosen probabilities by their sum."""

    def norm_head(
        self,
        step: Step,
        h: Array,
        norm: Norm,
        head: Linear,
        scale: float,
        logits: Array,
        softcap: float | None = None,
    ) -> None:
        """logits[R, V] = head(norm(h[rows])) * scale; with ``softcap`` c, c * tanh(that / c)."""

    def pick(self, logits: Array, requests: Sequence[PickRequest]) -> list[Pick]:
        """Choose one id per row, on the host. InternalError if a row is not finite."""

    # --- ceilings -----------------------------------------------------------------------------
    def measure_bandwidth(self) -> float:
        """Best read bandwidth of this device's memory in bytes per second, measured now."""

    def measure_flops(self) -> float:
        """Best rate of the matrix multiply prefill runs on, in FLOP per second, measured now."""


@dataclass(frozen=True)
class CpuOptions:
    """What only native kernels on the CPU can be told.

    ``decode_threads``: for steps of few tokens (None: as many as for long ones). ``isa``: the
    instruction set by name (None: the best). ``huge_pages``: ask the system for them. ``exact``:
    activations keep 16 bits beside 4-bit weights too, for twice their memory and time.
    """

    decode_threads: int | None = None
    isa: str | None = None
    huge_pages: bool = True
    exact: bool = False


@dataclass(frozen=True)
class BackendInfo:
    """What a backend module exports as ``BACKEND``.

    ``available(device)`` gives None or the reason; ``supports(op, kind)`` likewise for an op on a
    storage form's kind; ``create(device, threads, options)`` imports what is heavy and makes the
    backend. It refuses (UnavailableError) an instruction set that it cannot use; the rest of
    ``CpuOptions`` is advice.
    """

    name: str
    available: Callable[[str], str | None]
    supports: Callable[[str, str], str | None]
    create: Callable[[str, int, CpuOptions], Backend]
