"""The CPU backend's class: arrays and ops by the native library, as ``kernels.ops`` says."""

import ctypes
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from llmrun.errors import DoesNotFitError, InternalError, UnavailableError
from llmrun.kernels.cpu import abi
from llmrun.kernels.cpu.angles import AngleTables
from llmrun.kernels.cpu.arrays import KV_TYPES, CpuArray, CpuKvLayer, CpuStep
from llmrun.kernels.cpu.library import library, usable_isas
from llmrun.kernels.cpu.memory import Arena, Block, address_of
from llmrun.kernels.cpu.program import Program
from llmrun.kernels.cpu.sampling import Picker
from llmrun.kernels.cpu.weights import TYPES, CpuWeight, Packer
from llmrun.kernels.forms import Form, GroupInt
from llmrun.kernels.host import DType, HostArray, empty
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

MAX_HEAD_DIM = 512
"""As in ``attention.h``."""

FLOAT_BYTES = 4

FEW_TOKENS = 8
"""A step of at most so many tokens is decoding: short, and bound by memory."""

PROBE_BYTES = 512 << 20
PROBE_REPEATS = 5


class CpuBackend:
    """Native kernels on the CPU with a pool of ``threads`` threads.

    ``decode_threads``: for steps of at most FEW_TOKENS tokens; 0: as many as for others. ``isa``
    names an instruction set (None: the best); ``huge_pages`` and ``exact`` as in ``CpuOptions``;
    ``replay`` False runs every op by itself.
    """

    name = "cpu"
    device = "cpu"
    prefill_tokens = 256

    def __init__(
        self,
        threads: int,
        *,
        decode_threads: int = 0,
        isa: str | None = None,
        huge_pages: bool = True,
        exact: bool = False,
        replay: bool = True,
    ) -> None:
        self.threads = threads
        self.decode_threads = decode_threads
        self._library = library()
        most = max(threads, decode_threads)
        context = self._library.llmr_create(most, (isa or "").encode("ascii", "replace"))
        if not context and (not isa or isa in usable_isas()):
            raise DoesNotFitError(
                f"{most} threads of the CPU kernels could not be had",
                "close other programs, or use fewer with --threads",
            )
        if not context:
            raise UnavailableError(
                f"the instruction set {isa!r} cannot be used on this machine",
                f"leave --cpu-isa out for the best one, or use one of: {', '.join(usable_isas())}",
            )
        self._context: int = context
        self._prefill_threads = threads if threads < most else 0
        # Not at exit: a thread that nobody waits for may still compute with it.
        weakref.finalize(self, self._library.llmr_destroy, context).atexit = False
        self.isa: str = self._library.llmr_context_isa(context).decode("ascii")
        self._new_packer: Callable[[], Packer] = lambda: Packer(
            Arena(huge=huge_pages), threads, exact=exact
        )
        self._packer = self._new_packer()
        self._replay = replay
        self._angles = AngleTables()
        # By the first expert's id, which stays its own as long as the experts are held.
        self._mixtures: dict[int, tuple[ctypes.Array[ctypes.c_void_p], Sequence[Expert]]] = {}
        self._picker = Picker(self._library, context)
        self._recording: Program | None = None

    # --- arrays -------------------------------------------------------------------------------
    def weight(self, form: Form) -> CpuWeight:
        """Take over a 2-D weight in any form but 4-bit codes in groups of 16."""
        return self._packer.add(form)

    def widening(self, kind: str) -> int:
        """Some 4-bit codes are packed as 8-bit ones."""
        return 4 if self._packer.widens(kind) else 0

    def vector(self, host: HostArray) -> CpuArray:
        """A norm weight or bias as fp32."""
        array = CpuArray((host.size,))
        address, alive = address_of(host)
        self._library.llmr_widen(TYPES[host.dtype], address, array.address, host.size)
        del alive
        return array

    def empty(self, shape: tuple[int, ...]) -> CpuArray:
        """Activation memory, fp32."""
        return CpuArray(shape)

    def step(self, max_tokens: int) -> CpuStep:
        """A step for at most ``max_tokens`` tokens."""
        return CpuStep(max_tokens)

    def kv_layer(self, n_slots: int, capacity: int, heads: Heads, form: str) -> CpuKvLayer:
        """Cache memory of one layer. UnavailableError for a form or head size not served here."""
        if form not in KV_TYPES:
            raise UnavailableError(
                f"the CPU kernels hold keys and values in {' or '.join(KV_TYPES)}, not in {form}",
                "leave --kv out, or use a GPU with --device cuda",
            )
        if heads.head_dim > MAX_HEAD_DIM or heads.head_dim % 8:
            raise UnavailableError(
                f"the CPU kernels serve head sizes that are multiples of 8 up to {MAX_HEAD_DIM}, "
                f"not {heads.head_dim}",
                "choose another model",
            )
        return CpuKvLayer(n_slots, capacity, heads, form)

    def kv_copy(self, layer: CpuKvLayer, source: int, target: int, n_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        layer.copy(source, target, n_tokens)

    def to_host(self, array: CpuArray, n_rows: int) -> HostArray:
        """The first rows of an activation array."""
        return array.host(n_rows)

    def load(self, array: CpuArray, host: HostArray) -> None:
        """Write F32 [n, ...] into the first n rows of an activation array."""
        array.load(host)

    def release(self) -> None:
        """Lay weights taken over from now on apart from those before."""
        self._packer.finish()
        self._packer = self._new_packer()
        self._mixtures.clear()

    def free_bytes(self) -> int | None:
        """None: it works in host memory."""
        return None

    def workspace_bytes(self, sizes: Sizes) -> int | None:
        """None: it works in host memory."""
        return None

    def synchronize(self) -> None:
        """Pack the weights that still wait; every other call has ended when it returns."""
        self._packer.finish()

    # --- running ------------------------------------------------------------------------------
    def run_layers(
        self,
        step: CpuStep,
        kv: Sequence[CpuKvLayer],
        key: object,
        emit: Callable[[], Iterator[None]],
        interrupt: Interrupt,
    ) -> bool:
        """Run the ops that ``emit`` issues; recorded for this cache and key, then replayed."""
        if not self._replay or not kv:
            return not any(interrupt() for _ in emit())
        program = kv[0].programs.use(key)
        if program is None:
            program = kv[0].programs[key] = Program()
        if program.whole is not None:
            if step.native.n_tokens <= FEW_TOKENS:
                self._run(*program.whole, step)
                return True
            return program.replay(lambda first, n: self._run(first, n, step), interrupt)
        self._recording = program
        try:
            return program.record(emit(), interrupt)
        finally:
            self._recording = None

    def chain(
        self,
        step: CpuStep,
        kv: Sequence[CpuKvLayer],
        key: object,
        emit: Callable[[], Iterator[None]],
        logits: CpuArray,
        requests: Sequence[PickRequest],
    ) -> Chain | None:
        """None: the host computes, so there is nobody to run ahead of."""
        return None

    def _run(self, first: int, length: int, step: CpuStep) -> None:
        self._packer.finish()
        few = step.native.n_tokens <= FEW_TOKENS
        most = self.decode_threads if few else self._prefill_threads
        if not self._library.llmr_run(self._context, first, length, step.native, most):
            raise InternalError(
                "the threads of the CPU kernels could not be started",
                "close other programs, or use fewer with --threads",
            )

    def _issue(
        self,
        step: CpuStep,
        op: int,
        pointers: Sequence[int | None],
        numbers: Sequence[int],
        floats: Sequence[float],
    ) -> None:
        instr = abi.Instr(op=op)
        instr.i[: len(numbers)] = numbers
        instr.f[: len(floats)] = floats
        instr.p[: len(pointers)] = pointers
        if self._recording is not None:
            self._recording.add(instr)
        self._run(ctypes.addressof(instr), 1, step)

    # --- ops ----------------------------------------------------------------------------------
    def embed(self, step: CpuStep, table: CpuWeight, scale: float, h: CpuArray) -> None:
        """h[T, D] = table[token_ids] * scale."""
        self._issue(step, abi.EMBED, (table.address, h.address), (h.shape[1],), (scale,))

    def norm_linear(
        self, step: CpuStep, h: CpuArray, norm: Norm | None, linears: Sequence[Linear], y: CpuArray
    ) -> None:
        """y[T, sum N] = concatenation of the linears of norm(h)."""
        column = 0
        for _, same in itertools.groupby(linears, _order):  # an op reads its inputs in one order
            some = list(same)
            pointers = (
                h.address,
                *_vectors(norm),
                y.address + FLOAT_BYTES * column,
                *(linear.weight.address for linear in some),  # type: ignore[attr-defined]
                *(None,) * (3 - len(some)),
                *(_address(linear.bias) for linear in some),
            )
            numbers = (_norm_kind(norm), len(some), h.shape[1], y.shape[1])
            self._issue(step, abi.NORM_LINEAR, pointers, numbers, _norm_floats(norm))
            column += sum(linear.weight.shape[0] for linear in some)

    def rope_append(
        self,
        step: CpuStep,
        y: CpuArray,
        heads: Heads,
        rope: Rope | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        kv: CpuKvLayer,
    ) -> None:
        """Norm and rotate queries and keys; append keys and values to the cache."""
        angles = None if rope is None else self._angles.of(rope, kv.native.capacity)
        if angles is not None and self._recording is not None:
            self._recording.hold(angles)
        pointers = (
            y.address,
            *_vectors(q_norm),
            *_vectors(k_norm),
            None if angles is None else angles.frequencies,
            kv.address,
            *((None, None) if angles is None else (angles.address, angles.ready)),
        )
        n_freq = 0 if rope is None else len(rope.inv_freq)
        numbers = (_norm_kind(q_norm), _norm_kind(k_norm), *_sizes(heads), n_freq)
        factor = 1.0 if rope is None else rope.attention_factor
        floats = (*_norm_floats(q_norm), *_norm_floats(k_norm), factor)
        self._issue(step, abi.ROPE_APPEND, pointers, numbers, floats)

    def attend(
        self, step: CpuStep, y: CpuArray, attention: Attention, kv: CpuKvLayer, o: CpuArray
    ) -> None:
        """o[T, H dh]: causal softmax attention over each span's slot."""
        self._issue(
            step,
            abi.ATTEND,
            (y.address, o.address, kv.address, _address(attention.sinks)),
            (*_sizes(attention.heads), attention.window or 0),
            (attention.scale, attention.softcap or 0.0),
        )

    def linear_add(
        self,
        step: CpuStep,
        x: CpuArray,
        linear: Linear,
        post_norm: Norm | None,
        h: CpuArray,
        scale: float = 1.0,
    ) -> None:
        """h[T, D] += scale * post_norm(linear(x))."""
        pointers = (x.address, *_vectors(post_norm), *_pair(linear), h.address)
        numbers = (_norm_kind(post_norm), x.shape[1], linear.weight.shape[0])
        self._issue(step, abi.LINEAR_ADD, pointers, numbers, (*_norm_floats(post_norm), scale))

    def norm_gate_up(
        self,
        step: CpuStep,
        h: CpuArray,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: str,
        a: CpuArray,
    ) -> None:
        """a[T, F] = activation(gate(norm(h))) * up(norm(h)); without a gate, of up alone."""
        if gate is None and activation == "swiglu_clamped":
            raise ValueError(f"activation {activation!r} without a gate")
        if gate is not None and _order(gate) != _order(up):
            raise _unordered("a gate and an up projection that read their inputs in two orders")
        gated = (None, None) if gate is None else _pair(gate)
        pointers = (h.address, *_vectors(norm), *gated, *_pair(up), a.address)
        numbers = (_norm_kind(norm), h.shape[1], a.shape[1], abi.ACTIVATIONS[activation])
        self._issue(step, abi.NORM_GATE_UP, pointers, numbers, _norm_floats(norm))

    def moe_add(
        self,
        step: CpuStep,
        h: CpuArray,
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
        parts = (part for expert in experts for part in (expert.gate, expert.up, expert.down))
        if any(_order(part) is not None for part in parts):
            raise _unordered("experts with reordered columns")
        inner = experts[0].gate.weight.shape[0]
        flat = self._experts(experts)
        if self._recording is not None:
            self._recording.hold(flat)
        pointers = (h.address, *_vectors(norm), *_pair(router), ctypes.addressof(flat))
        numbers = (
            _norm_kind(norm),
            h.shape[1],
            inner,
            len(experts),
            top_k,
            int(normalize),
            abi.ACTIVATIONS[activation],
        )
        self._issue(step, abi.MOE_ADD, pointers, numbers, (*_norm_floats(norm), scale))

    def norm_head(
        self,
        step: CpuStep,
        h: CpuArray,
        norm: Norm,
        head: Linear,
        scale: float,
        logits: CpuArray,
        softcap: float | None = None,
    ) -> None:
        """logits[R, V] = head(norm(h[rows])) * scale, soft-capped."""
        pointers = (h.address, *_vectors(norm), *_pair(head), logits.address)
        numbers = (_norm_kind(norm), h.shape[1], logits.shape[1])
        floats = (*_norm_floats(norm), scale, softcap or 0.0)
        self._issue(step, abi.NORM_HEAD, pointers, numbers, floats)

    def pick(self, logits: CpuArray, requests: Sequence[PickRequest]) -> list[Pick]:
        """Choose one id per row. InternalError if a row is not finite."""
        row_bytes = 4 * logits.shape[1]
        return [
            self._picker.pick(logits.address + row * row_bytes, request)
            for row, request in enumerate(requests)
        ]

    # An array that an instruction points at and nobody else keeps.
    def _experts(self, experts: Sequence[Expert]) -> ctypes.Array[ctypes.c_void_p]:
        key = id(experts[0])
        if key not in self._mixtures:
            flat = [p for e in experts for part in (e.gate, e.up, e.down) for p in _pair(part)]
            self._mixtures[key] = (ctypes.c_void_p * len(flat))(*flat), experts
        return self._mixtures[key][0]

    # --- ceilings -----------------------------------------------------------------------------
    def measure_bandwidth(self) -> float:
        """Bytes per second of reading a buffer far larger than the caches."""
        buffer = Block(PROBE_BYTES, huge=True)
        ctypes.memset(buffer.address, 1, PROBE_BYTES)
        read = self._library.llmr_read
        return PROBE_BYTES / _best(lambda: read(self._context, buffer.address, PROBE_BYTES))

    def measure_flops(self) -> float:
        """FLOP per second of the product prefill runs on: int4 groups of 32, 2048 x 2048."""
        n = k = 2048
        n_tokens = 256
        codes = HostArray(DType.U8, (n, k // 2), memoryview(bytearray(b"\x97") * (n * k // 2)))
        form = GroupInt(4, 32, codes, empty(DType.F16, (n, k // 32)), None, (n, k))
        packer = Packer(Arena(huge=True), self.threads)
        weight = packer.add(form)
        packer.finish()
        x, h = self.empty((n_tokens, k)), self.empty((n_tokens, n))
        step = self.step(n_tokens)
        step.native.n_tokens = n_tokens
        linear = Linear(weight)
        return 2.0 * n * k * n_tokens / _best(lambda: self.linear_add(step, x, linear, None, h))


def _best(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(PROBE_REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _vectors(norm: Norm | None) -> tuple[int | None, int | None]:
    return (None, None) if norm is None else (norm.gamma.address, _address(norm.beta))


def _norm_kind(norm: Norm | None) -> int:
    if norm is None:
        return abi.NO_NORM
    if norm.whole:
        return abi.WHOLE_RMS_NORM
    return abi.LAYER_NORM if norm.centered else abi.RMS_NORM


def _norm_floats(norm: Norm | None) -> tuple[float, float]:
    return (0.0, 0.0) if norm is None else (norm.eps, norm.offset)


def _order(linear: Linear) -> bytes | None:
    assert isinstance(linear.weight, CpuWeight)
    return linear.weight.order


def _unordered(what: str) -> UnavailableError:
    return UnavailableError(
        f"the CPU kernels do not serve {what}", "choose a scheme with -q int8 --requantize"
    )


def _address(array: CpuArray | None) -> int | None:
    return None if array is None else array.address


def _pair(linear: Linear) -> tuple[int, int | None]:
    assert isinstance(linear.weight, CpuWeight)
    return linear.weight.address, _address(linear.bias)


def _sizes(heads: Heads) -> tuple[int, int, int]:
    return heads.n_heads, heads.n_kv_heads, heads.head_dim
