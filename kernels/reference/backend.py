"""The reference backend's class: arrays, ops and measured ceilings on one torch device."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from llmrun.kernels.cuda import working_bytes
from llmrun.kernels.forms import Form
from llmrun.kernels.forms import nbytes as form_bytes
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
from llmrun.kernels.reference import attention as attention_ops
from llmrun.kernels.reference import sampling
from llmrun.kernels.reference.allocation import allocating
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.kernels.reference.norms import activate, gated, normed
from llmrun.kernels.reference.step import TorchKvLayer, TorchStep, kv_layer
from llmrun.kernels.reference.weights import Scratch, TorchWeight, take_over

PROBE_BYTES = 512 << 20
PROBE_REPEATS = 5


class TorchBackend:
    """Plain torch in fp32 on ``cpu`` or ``cuda``; the contract is ``kernels.ops.Backend``."""

    name = "reference"
    isa: str | None = None
    prefill_tokens = 256

    def __init__(self, device: str, threads: int) -> None:
        self.device = device
        self.threads = threads
        self._device = torch.device(device)
        self._scratch = Scratch(self._device)
        torch.set_num_threads(threads)

    # --- arrays -------------------------------------------------------------------------------
    def weight(self, form: Form) -> TorchWeight:
        """Take over a 2-D weight in any form."""
        with allocating(f"a weight of {form_bytes(form):,} bytes"):
            return take_over(form, self._scratch, self._device)

    def widening(self, kind: str) -> int:
        """None: forms are kept as they are."""
        return 0

    def vector(self, host: HostArray) -> torch.Tensor:
        """A norm weight or bias as fp32."""
        return as_tensor(host).to(self._device, torch.float32, copy=True)

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Activation memory, fp32."""
        with allocating(f"activations of shape {shape}"):
            return torch.empty(shape, device=self._device)

    def step(self, max_tokens: int) -> TorchStep:
        """A step for at most ``max_tokens`` tokens."""
        return TorchStep(max_tokens, self._device)

    def kv_layer(self, n_slots: int, capacity: int, heads: Heads, form: str) -> TorchKvLayer:
        """Cache memory of one layer."""
        with allocating(f"a KV cache of {capacity:,} tokens"):
            return kv_layer(n_slots, capacity, heads, form, self._device)

    def kv_copy(self, layer: TorchKvLayer, source: int, target: int, n_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for part in layer.tensors:
            part[target, :, :n_tokens].copy_(part[source, :, :n_tokens])

    def to_host(self, array: torch.Tensor, n_rows: int) -> HostArray:
        """The first rows of an activation array as F32."""
        return to_host(array[:n_rows].float().cpu())

    def load(self, array: torch.Tensor, host: HostArray) -> None:
        """Write F32 [n, ...] into the first n rows of an activation array."""
        array[: host.shape[0]].copy_(as_tensor(host))

    def release(self) -> None:
        """Nothing to do: torch gives back what nobody holds."""

    def free_bytes(self) -> int | None:
        """Free bytes of the GPU; None on the CPU."""
        if self._device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def workspace_bytes(self, sizes: Sizes) -> int | None:
        """What it takes of a GPU beside weights and cache; None on the CPU."""
        return working_bytes(sizes) if self._device.type == "cuda" else None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # --- running ------------------------------------------------------------------------------
    def run_layers(
        self,
        step: TorchStep,
        kv: Sequence[TorchKvLayer],
        key: object,
        emit: Callable[[], Iterator[None]],
        interrupt: Interrupt,
    ) -> bool:
        """Run the ops as they come."""
        return not any(interrupt() for _ in emit())

    def chain(
        self,
        step: TorchStep,
        kv: Sequence[TorchKvLayer],
        key: object,
        emit: Callable[[], Iterator[None]],
        logits: torch.Tensor,
        requests: Sequence[PickRequest],
    ) -> Chain | None:
        """None: each step is issued from the host."""
        return None

    # --- ops ----------------------------------------------------------------------------------
    def embed(self, step: TorchStep, table: TorchWeight, scale: float, h: torch.Tensor) -> None:
        """h[T, D] = table[token_ids] * scale."""
        table.gather_rows(step.token_ids, h[: step.n_tokens])
        if scale != 1.0:
            h[: step.n_tokens].mul_(scale)

    def norm_linear(
        self,
        step: TorchStep,
        h: torch.Tensor,
        norm: Norm | None,
        linears: Sequence[Linear],
        y: torch.Tensor,
    ) -> None:
        """y[T, sum N] = concatenation of the linears of norm(h)."""
        x = normed(h[: step.n_tokens], norm)
        start = 0
        for linear in linears:
            stop = start + linear.weight.shape[0]
            self._linear(x, linear, y[: step.n_tokens, start:stop])
            start = stop

    def rope_append(
        self,
        step: TorchStep,
        y: torch.Tensor,
        heads: Heads,
        rope: Rope | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        kv: TorchKvLayer,
    ) -> None:
        """Norm and rotate queries and keys; append keys and values to the cache."""
        attention_ops.rope_append(step, y, heads, rope, q_norm, k_norm, kv)

    def attend(
        self,
        step: TorchStep,
        y: torch.Tensor,
        attention: Attention,
        kv: TorchKvLayer,
        o: torch.Tensor,
    ) -> None:
        """Causal softmax attention over each span's slot."""
        attention_ops.attend(step, y, attention, kv, o)

    def linear_add(
        self,
        step: TorchStep,
        x: torch.Tensor,
        linear: Linear,
        post_norm: Norm | None,
        h: torch.Tensor,
        scale: float = 1.0,
    ) -> None:
        """h[T, D] += scale * post_norm(linear(x))."""
        y = torch.empty(step.n_tokens, linear.weight.shape[0], device=self._device)
        self._linear(x[: step.n_tokens], linear, y)
        h[: step.n_tokens].add_(normed(y, post_norm), alpha=scale)

    def norm_gate_up(
        self,
        step: TorchStep,
        h: torch.Tensor,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: str,
        a: torch.Tensor,
    ) -> None:
        """a[T, F] = activation(gate(norm(h))) * up(norm(h)); without a gate, of up alone."""
        x = normed(h[: step.n_tokens], norm)
        a[: step.n_tokens].copy_(self._gate_up(x, gate, up, activation))

    def moe_add(
        self,
        step: TorchStep,
        h: torch.Tensor,
        norm: Norm,
        router: Linear,
        experts: Sequence[Expert],
        top_k: int,
        normalize: bool,
        activation: str,
        scale: float = 1.0,
    ) -> None:
        """h[T, D] += scale * sum over the chosen experts of probability * expert(norm(h))."""
        rows = h[: step.n_tokens]
        x = normed(rows, norm)
        scores = torch.empty(step.n_tokens, len(experts), device=self._device)
        self._linear(x, router, scores)
        chosen = torch.topk(torch.softmax(scores, dim=-1), top_k)
        share = chosen.values
        if normalize:
            share = share / share.sum(-1, keepdim=True)
        share = share * scale
        for number, expert in enumerate(experts):
            token, rank = torch.nonzero(chosen.indices == number, as_tuple=True)
            if len(token) == 0:
                continue
            inner = self._gate_up(x[token], expert.gate, expert.up, activation)
            y = torch.empty(len(token), rows.shape[1], device=self._device)
            self._linear(inner, expert.down, y)
            rows.index_add_(0, token, y * share[token, rank].unsqueeze(-1))

    def norm_head(
        self,
        step: TorchStep,
        h: torch.Tensor,
        norm: Norm,
        head: Linear,
        scale: float,
        logits: torch.Tensor,
        softcap: float | None = None,
    ) -> None:
        """logits[R, V] = head(norm(h[rows])) * scale, soft-capped."""
        rows = logits[: step.n_rows]
        self._linear(normed(h[step.rows], norm), head, rows)
        if scale != 1.0:
            rows.mul_(scale)
        if softcap is not None:
            rows.div_(softcap).tanh_().mul_(softcap)

    def pick(self, logits: torch.Tensor, requests: Sequence[PickRequest]) -> list[Pick]:
        """Choose one id per row."""
        return [sampling.pick(logits[row], request) for row, request in enumerate(requests)]

    def _gate_up(
        self, x: torch.Tensor, gate: Linear | None, up: Linear, activation: str
    ) -> torch.Tensor:
        raised = torch.empty(x.shape[0], up.weight.shape[0], device=self._device)
        self._linear(x, up, raised)
        if gate is None:
            return activate(raised, activation)
        opened = torch.empty_like(raised)
        self._linear(x, gate, opened)
        return gated(opened, raised, activation)

    def _linear(self, x: torch.Tensor, linear: Linear, y: torch.Tensor) -> None:
        weight = linear.weight
        assert isinstance(weight, TorchWeight)
        weight.multiply(x, y)
        if linear.bias is not None:
            y.add_(linear.bias)

    # --- ceilings -----------------------------------------------------------------------------
    def measure_bandwidth(self) -> float:
        """Bytes per second of summing a buffer far larger than the caches."""
        buffer = torch.ones(PROBE_BYTES // 4, device=self._device)
        return buffer.nbytes / self._best(lambda: buffer.sum())

    def measure_flops(self) -> float:
        """FLOP per second of an fp32 matrix product of 1024 x 2048 x 2048."""
        left = torch.ones(1024, 2048, device=self._device)
        right = torch.ones(2048, 2048, device=self._device)
        out = torch.empty(1024, 2048, device=self._device)
        seconds = self._best(lambda: torch.mm(left, right, out=out))
        return 2 * 1024 * 2048 * 2048 / seconds

    def _best(self, work: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(PROBE_REPEATS):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            best = min(best, time.perf_counter() - start)
        return best
