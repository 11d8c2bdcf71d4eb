"""The GPU backend's class: the op contract in Triton kernels, decode steps as planned launches.

A step of at most ``arrays.SMALL`` tokens is decoding: its ops are collected, planned (``plan.py``)
and launched, or replayed as one CUDA graph (``graphs.py``). Longer steps run op by op
(``prefill.py``).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from llmrun.errors import UnavailableError
from llmrun.kernels.cuda import working_bytes
from llmrun.kernels.forms import Form
from llmrun.kernels.forms import nbytes as form_bytes
from llmrun.kernels.gpu import attention as attention_ops
from llmrun.kernels.gpu import ceilings, embedding, rows, weights
from llmrun.kernels.gpu import linear as linear_ops
from llmrun.kernels.gpu.arrays import (
    SMALL,
    Factor,
    Fold,
    GpuArray,
    GpuKvLayer,
    GpuStep,
    GpuWeight,
    Prepared,
    Workspace,
)
from llmrun.kernels.gpu.chain import Chains
from llmrun.kernels.gpu.device import device_of
from llmrun.kernels.gpu.graphs import Graphs, shape_of
from llmrun.kernels.gpu.heuristics import Tuned
from llmrun.kernels.gpu.linear import Best
from llmrun.kernels.gpu.mixture import MoeShare, moe_add
from llmrun.kernels.gpu.pick import Picker
from llmrun.kernels.gpu.plan import Call, Plan, Read, foldable, plan
from llmrun.kernels.gpu.prefill import Prefill
from llmrun.kernels.host import HostArray
from llmrun.kernels.ops import (
    Attention,
    Chain,
    Expert,
    Heads,
    Interrupt,
    Linear,
    Norm,
    Pick,
    PickRequest,
    Rope,
    Sizes,
)
from llmrun.kernels.reference.allocation import allocating
from llmrun.kernels.reference.arrays import as_tensor, to_host


@dataclass(frozen=True, eq=False)
class _Planning:
    """The ops of a step that is being planned, and what its head finds of its logits."""

    calls: list[Call]
    best: Best | None


class GpuBackend:
    """Triton kernels on ``cuda`` or ``cuda:N``; on ``cpu`` in Triton's interpreter, for tests.

    ``eager`` launches decode steps one kernel after another, without graphs. ``tuned``: launches
    of the linears as somebody measured them here. The contract is ``kernels.ops.Backend``.
    """

    name = "gpu"
    threads = 1
    isa: str | None = None
    prefill_tokens = 4096

    def __init__(self, device: str, *, eager: bool = False) -> None:
        self.device = device
        self._device = torch.device(device)
        self._work = Workspace.empty(self._device)
        self._prefill = Prefill(self._device)
        self._permuted: dict[int, Prepared] = {}
        self._unnormed: dict[int, torch.Tensor] = {}
        self._planning: _Planning | None = None
        runtime = device_of(self._device)
        self._graphs = Graphs(runtime, eager=eager)
        self._chains = Chains(runtime, self._graphs)
        self._picker = Picker()
        self.tuned: Tuned = {}

    def _make_current(self) -> None:
        """Kernels are launched on a thread's current device, which is the first one at first."""
        if self._device.index:
            torch.cuda.set_device(self._device)

    # --- arrays -------------------------------------------------------------------------------
    def weight(self, form: Form) -> GpuWeight:
        """Take over a 2-D weight. UnavailableError for a form that no kernel serves."""
        self._make_current()
        with allocating(f"a weight of {form_bytes(form):,} bytes"):
            return weights.take_over(form, self._device)

    def widening(self, kind: str) -> int:
        """None: codes keep their width."""
        return 0

    def vector(self, host: HostArray) -> torch.Tensor:
        """A norm weight or bias as fp32."""
        return as_tensor(host).to(self._device, torch.float32, copy=True)

    def empty(self, shape: tuple[int, ...]) -> GpuArray:
        """Activation memory, fp32; behind few rows there is room for those of a step's bucket."""
        with allocating(f"activations of shape {shape}"):
            whole = torch.empty(max(shape[0], SMALL), *shape[1:], device=self._device)
        return GpuArray(whole[: shape[0]])

    def step(self, max_tokens: int) -> GpuStep:
        """A step for at most ``max_tokens`` tokens."""
        return GpuStep(max_tokens, self._device)

    def kv_layer(self, n_slots: int, capacity: int, heads: Heads, form: str) -> GpuKvLayer:
        """Cache memory of one layer."""
        with allocating(f"a KV cache of {capacity:,} tokens"):
            return attention_ops.kv_layer(n_slots, capacity, heads, form, self._device)

    def kv_copy(self, layer: GpuKvLayer, source: int, target: int, n_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        attention_ops.kv_copy(layer, source, target, n_tokens)

    def to_host(self, array: GpuArray, n_rows: int) -> HostArray:
        """The first rows of an activation array as F32."""
        return to_host(array.values[:n_rows].cpu())

    def load(self, array: GpuArray, host: HostArray) -> None:
        """Write F32 [n, ...] into the first n rows of an activation array."""
        array.values[: host.shape[0]].copy_(as_tensor(host))

    def release(self) -> None:
        """Nothing to do: torch gives back what nobody holds."""

    def free_bytes(self) -> int | None:
        """Free bytes of the GPU; None in the interpreter."""
        if self._device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def workspace_bytes(self, sizes: Sizes) -> int | None:
        """What a decoder takes beside weights and cache; None in the interpreter."""
        return working_bytes(sizes) if self._device.type == "cuda" else None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # --- running ------------------------------------------------------------------------------
    def run_layers(
        self,
        step: GpuStep,
        kv: Sequence[GpuKvLayer],
        key: Hashable,
        emit: Callable[[], Iterator[None]],
        interrupt: Interrupt,
    ) -> bool:
        """Prefill layer by layer; a decode step as one plan, which is not interrupted."""
        self._make_current()
        if not step.small:
            return not any(interrupt() for _ in emit())
        self._graphs.run(step, kv, (key, shape_of(step)), lambda: self._planned(emit))
        return True

    def chain(
        self,
        step: GpuStep,
        kv: Sequence[GpuKvLayer],
        key: Hashable,
        emit: Callable[[], Iterator[None]],
        logits: GpuArray,
        requests: Sequence[PickRequest],
    ) -> Chain | None:
        """Decode steps that feed back what they choose."""
        planned = lambda best: self._planned(emit, best)  # noqa: E731
        return self._chains.start(step, kv, key, planned, logits.values, requests)

    def _planned(self, emit: Callable[[], Iterator[None]], best: Best | None = None) -> Plan:
        """The plan of the ops that ``emit`` issues for a decode step; nothing is launched.

        ``best``: what the head writes beside its logits.
        """
        planning = self._planning = _Planning([], best)
        try:
            for _ in emit():
                pass
        finally:
            self._planning = None
        return plan(planning.calls, self._prepare)

    def _issue(self, call: Call) -> None:
        if self._planning is None:
            plan([call], self._prepare).run()
        else:
            self._planning.calls.append(call)

    def _prepare(self, read: Read) -> None:
        rows.prepare(read.array.values, read.norm, read.array.prepared, read.rows)

    def _ordered(self, x: Prepared, weight: GpuWeight, m: int) -> Prepared:
        """Inputs in the order in which a weight's columns lie."""
        if weight.columns is None:
            return x
        k = weight.shape[1]
        onto = self._permuted.get(k)
        if onto is None:
            onto = self._permuted[k] = Prepared.empty(k, self._device)
        rows.permute(x, weight.columns, onto, m)
        return onto

    # --- ops ----------------------------------------------------------------------------------
    def embed(self, step: GpuStep, table: GpuWeight, scale: float, h: GpuArray) -> None:
        """h[T, D] = table[token_ids] * scale."""
        self._make_current()
        if not step.small:
            self._prefill.embed(step, table, scale, h)
            return
        m = step.bucket

        def launch(wanted: bool, fold: Fold | None) -> None:
            onto = h.prepared if wanted else None
            embedding.embed_rows(table, step.ids, step.slots, scale, h.values, onto, fold, m)

        self._issue(Call(launch, writes=h))

    def norm_linear(
        self,
        step: GpuStep,
        h: GpuArray,
        norm: Norm | None,
        linears: Sequence[Linear],
        y: GpuArray,
    ) -> None:
        """y[T, sum N] = concatenation of the linears of norm(h)."""
        if not step.small:
            self._prefill.norm_linear(step, h, norm, linears, y)
            return
        m, factor = step.bucket, _factor(norm)
        groups = _by_order([(_weight(linear), linear.bias) for linear in linears])

        def launch(wanted: bool, fold: Fold | None) -> None:
            column = 0
            for parts in groups:
                x = self._ordered(h.prepared, parts[0][0], m)
                stop = column + sum(weight.shape[0] for weight, _ in parts)
                linear_ops.linears(
                    x, factor, parts, y.values[:, column:stop], m, self._work, self.tuned
                )
                column = stop

        self._issue(Call(launch, Read(h, norm, m)))

    def rope_append(
        self,
        step: GpuStep,
        y: GpuArray,
        heads: Heads,
        rope: Rope | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        kv: GpuKvLayer,
    ) -> None:
        """Norm and rotate queries and keys; append keys and values to the cache."""
        n = step.bucket if step.small else step.n_tokens

        def launch(wanted: bool, fold: Fold | None) -> None:
            attention_ops.rope_append(
                y.values, heads, rope, q_norm, k_norm, step.positions, step.slots, n, kv
            )

        self._issue(Call(launch))

    def attend(
        self, step: GpuStep, y: GpuArray, attention: Attention, kv: GpuKvLayer, o: GpuArray
    ) -> None:
        """o[T, H dh]: causal softmax attention over each span's slot."""
        if not step.small:
            attention_ops.attend_many(y.values, attention, step.spans, kv, o.values)
            return
        m = step.bucket

        def launch(wanted: bool, fold: Fold | None) -> None:
            attention_ops.attend_few(
                y.values, attention, step.positions, step.slots, m, kv, o.values, o.prepared,
                self._work,
            )  # fmt: skip

        self._issue(Call(launch, prepares=o))

    def linear_add(
        self,
        step: GpuStep,
        x: GpuArray,
        linear: Linear,
        post_norm: Norm | None,
        h: GpuArray,
        scale: float = 1.0,
    ) -> None:
        """h[T, D] += scale * post_norm(linear(x))."""
        if not step.small:
            self._prefill.linear_add(step, x, linear, post_norm, h, scale)
            return
        m, weight, bias = step.bucket, _weight(linear), linear.bias
        between = self._between(weight.shape[0]) if post_norm is not None else None

        def launch(wanted: bool, fold: Fold | None) -> None:
            inputs = self._ordered(x.prepared, weight, m)
            onto = h.prepared if wanted else None
            if post_norm is None:
                linear_ops.linear_add(
                    inputs, weight, bias, scale, h.values, m, onto, fold, self._work, self.tuned
                )
                return
            assert between is not None
            linear_ops.linears(inputs, None, [(weight, bias)], between, m, self._work, self.tuned)
            rows.norm_add(between, post_norm, scale, h.values, m, onto, fold)

        self._issue(Call(launch, Read(x, None, m), writes=h))

    def _between(self, n: int) -> torch.Tensor:
        """Memory [SMALL, n] between a linear and the norm behind it."""
        if n not in self._unnormed:
            self._unnormed[n] = torch.empty(SMALL, n, device=self._device)
        return self._unnormed[n]

    def norm_gate_up(
        self,
        step: GpuStep,
        h: GpuArray,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: str,
        a: GpuArray,
    ) -> None:
        """a[T, F] = activation(gate(norm(h))) * up(norm(h)); without a gate, of up alone."""
        if gate is None and activation == "swiglu_clamped":
            raise ValueError(f"activation {activation!r} without a gate")
        if gate is not None and _columns(gate) is not _columns(up):
            raise UnavailableError(
                "the GPU kernels do not serve a gate and an up projection that read their inputs "
                "in two orders",
                "choose a scheme with -q int8 --requantize",
            )
        if not step.small:
            self._prefill.norm_gate_up(step, h, norm, gate, up, activation, a)
            return
        m, factor = step.bucket, _factor(norm)
        gated = None if gate is None else (_weight(gate), gate.bias)
        upper = (_weight(up), up.bias)

        def launch(wanted: bool, fold: Fold | None) -> None:
            x = self._ordered(h.prepared, upper[0], m)
            linear_ops.gate_up(
                x, factor, gated, upper, activation, a.values, a.prepared, m, self._work, self.tuned
            )

        self._issue(Call(launch, Read(h, norm, m), prepares=a))

    def moe_add(
        self,
        step: GpuStep,
        h: GpuArray,
        norm: Norm,
        router: Linear,
        experts: Sequence[Expert],
        top_k: int,
        normalize: bool,
        activation: str,
        scale: float = 1.0,
    ) -> None:
        """h[T, D] += scale * sum over the chosen experts of probability * expert(norm(h))."""
        if not 0 < top_k <= len(experts):
            raise ValueError(f"{top_k} of {len(experts)} experts")
        n = step.n_tokens

        def launch(wanted: bool, fold: Fold | None) -> None:
            share = MoeShare(top_k, normalize, scale)
            moe_add(self._prefill, h.values[:n], norm, router, experts, activation, share)

        # The host must know which experts were chosen, so no graph can hold it.
        self._issue(Call(launch, writes=h, capturable=False, folds=False))

    def norm_head(
        self,
        step: GpuStep,
        h: GpuArray,
        norm: Norm,
        head: Linear,
        scale: float,
        logits: GpuArray,
        softcap: float | None = None,
    ) -> None:
        """logits[R, V] = head(norm(h[rows])) * scale, soft-capped."""
        if not step.small:
            self._prefill.norm_head(step, h, norm, head, scale, logits, softcap)
            return
        weight = _weight(head)
        n_rows = min(step.rows_bucket, logits.values.shape[0])
        best = None if self._planning is None else self._planning.best

        def launch(wanted: bool, fold: Fold | None) -> None:
            x = self._ordered(h.prepared, weight, step.bucket)
            linear_ops.head(
                x, _factor(norm), weight, step.rows, n_rows, scale, softcap, logits.values,
                best, self._work, head.bias, self.tuned,
            )  # fmt: skip

        self._issue(Call(launch, Read(h, norm, step.bucket)))

    def pick(self, logits: GpuArray, requests: Sequence[PickRequest]) -> list[Pick]:
        """Choose one id per row. InternalError if a row is not finite."""
        self._make_current()
        return self._picker.pick(logits.values, requests)

    # --- ceilings -----------------------------------------------------------------------------
    def measure_bandwidth(self) -> float:
        """Bytes per second of reading a buffer far larger than the caches."""
        return ceilings.bandwidth(self._device)

    def measure_flops(self) -> float:
        """FLOP per second of a bf16 matrix multiply, the one prefill runs on."""
        return ceilings.flops(self._device)


Part = tuple[GpuWeight, torch.Tensor | None]


def _weight(linear: Linear) -> GpuWeight:
    assert isinstance(linear.weight, GpuWeight)
    return linear.weight


def _columns(linear: Linear) -> torch.Tensor | None:
    return _weight(linear).columns


def _by_order(parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours that read their inputs in one order; only columns in order are known as equal."""
    groups: list[list[Part]] = []
    for part in parts:
        in_order = part[0].columns is None
        if groups and in_order and groups[-1][0][0].columns is None:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _factor(norm: Norm | None) -> Factor | None:
    """The factor that a linear applies; None where its inputs are finished."""
    if norm is None or not foldable(norm):
        return None
    return Factor(len(norm.gamma), norm.eps)
