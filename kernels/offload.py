"""A backend made of two: whole layers on a device, those that do not fit on the host.

Weights and cache lie where their layer computes, norms and biases on both sides. Activations are
pairs of arrays; the hidden states cross, through host memory, where two layers lie apart. Each
side runs its stretches of layers by its own ``run_layers``, so it records and replays them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llmrun.errors import InternalError
from llmrun.kernels.forms import Form
from llmrun.kernels.host import HostArray
from llmrun.kernels.ops import (
    Array,
    Attention,
    Backend,
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
from llmrun.kernels.sides import (
    Both,
    Crossing,
    PlacedKvLayer,
    PlacedWeight,
    Recording,
    Route,
    Side,
    Stretch,
    Twin,
    TwinStep,
)


class OffloadBackend:
    """``device`` computes the layers that ``layers`` gives it, ``host`` the others.

    Before each weight is handed over, ``place`` says where it is to lie: a layer's on the layer's
    side, embedding and head on any. What a caller gets is a backend; the contract is that of
    ``kernels.ops.Backend``. Ops outside of ``run_layers`` run at once.
    """

    isa: str | None = None

    def __init__(self, device: Backend, host: Backend, layers: Sequence[Side]) -> None:
        self.name = f"{device.name}+{host.name}"
        self.device = f"{device.device}+{host.device}"
        self.threads = host.threads
        self.prefill_tokens = min(device.prefill_tokens, host.prefill_tokens)
        self.layers = tuple(layers)
        self._backends = {Side.DEVICE: device, Side.HOST: host}
        self._side = Side.DEVICE
        self._bytes = dict.fromkeys(Side, 0)
        self._kv_made = 0
        self._recording: Recording | None = None

    # --- arrays -------------------------------------------------------------------------------
    def place(self, side: Side) -> None:
        """Weights handed over from now on lie on that side."""
        self._side = side

    def weight(self, form: Form) -> PlacedWeight:
        """Take over a 2-D weight. UnavailableError if no kernel of its side serves its form."""
        placed = PlacedWeight(self._side, self._backends[self._side].weight(form))
        self._bytes[self._side] += placed.nbytes
        return placed

    def widening(self, kind: str) -> int:
        """As on the side where the next weight is to lie."""
        return self._backends[self._side].widening(kind)

    def vector(self, host: HostArray) -> Both:
        """A norm weight or bias, on both sides."""
        return Both({side: backend.vector(host) for side, backend in self._backends.items()})

    def empty(self, shape: tuple[int, ...]) -> Twin:
        """Activation memory."""
        return Twin(lambda side: self._backends[side].empty(shape))

    def step(self, max_tokens: int) -> TwinStep:
        """A step for at most ``max_tokens`` tokens."""
        return TwinStep({side: self._backends[side].step(max_tokens) for side in Side})

    def kv_layer(self, n_slots: int, capacity: int, heads: Heads, form: str) -> PlacedKvLayer:
        """Cache memory of the next layer: a cache takes its layers in order, all of them."""
        number, self._kv_made = self._kv_made, 0
        side = self.layers[number]
        own = self._backends[side].kv_layer(n_slots, capacity, heads, form)
        self._kv_made = (number + 1) % len(self.layers)  # after a failure a cache starts anew
        return PlacedKvLayer(side, own)

    def kv_copy(self, layer: PlacedKvLayer, source: int, target: int, n_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        self._backends[layer.side].kv_copy(layer.own, source, target, n_tokens)

    def to_host(self, array: Twin | Both, n_rows: int) -> HostArray:
        """The first rows of an activation array, from where they were written last."""
        side = (array.side if isinstance(array, Twin) else None) or Side.HOST
        return self._backends[side].to_host(array.on(side), n_rows)

    def load(self, array: Twin, host: HostArray) -> None:
        """Write F32 [n, ...] into the first n rows of an activation array."""
        array.side = array.side or Side.HOST
        self._backends[array.side].load(array.on(array.side), host)

    def release(self) -> None:
        """Both lay apart what is taken over from now on."""
        for backend in self._backends.values():
            backend.release()

    def free_bytes(self) -> int | None:
        """Free memory of the device."""
        return self._backends[Side.DEVICE].free_bytes()

    def workspace_bytes(self, sizes: Sizes) -> int | None:
        """What the device takes beside weights and cache."""
        return self._backends[Side.DEVICE].workspace_bytes(sizes)

    def synchronize(self) -> None:
        """Wait for both."""
        for backend in self._backends.values():
            backend.synchronize()

    # --- running ------------------------------------------------------------------------------
    def run_layers(
        self,
        step: TwinStep,
        kv: Sequence[PlacedKvLayer],
        key: object,
        emit: Callable[[], Iterator[None]],
        interrupt: Interrupt,
    ) -> bool:
        """Run the ops that ``emit`` issues, stretch by stretch, each by its side.

        They are noted once for this cache and key; from then on the sides replay them.
        """
        route = kv[0].routes.get(key)
        if route is None:
            route = kv[0].routes[key] = self._route(kv, emit)
        for number, stretch in enumerate(route.stretches):
            if number and interrupt():
                return False
            for crossing in stretch.crossings:
                self._cross(crossing, step.n_tokens)
            if not self._run(stretch, step, (key, number), interrupt):
                return False
        for array, side in route.left:
            array.side = side
        return True

    def chain(
        self,
        step: TwinStep,
        kv: Sequence[PlacedKvLayer],
        key: object,
        emit: Callable[[], Iterator[None]],
        logits: Twin,
        requests: Sequence[PickRequest],
    ) -> Chain | None:
        """None: the host takes part in every step."""
        return None

    def _route(self, kv: Sequence[PlacedKvLayer], emit: Callable[[], Iterator[None]]) -> Route:
        if tuple(layer.side for layer in kv) != self.layers:
            raise InternalError("a cache lies on other sides than the layers that fill it")
        self._recording = Recording()
        try:
            for _, layer in zip(emit(), kv, strict=True):
                self._recording.end_layer(layer)
            return self._recording.route()
        finally:
            self._recording = None

    def _run(self, stretch: Stretch, step: TwinStep, key: object, interrupt: Interrupt) -> bool:
        backend, own = self._backends[stretch.side], step.on(stretch.side)
        if stretch.kv:
            return backend.run_layers(own, stretch.kv, key, stretch.emit, interrupt)
        for _ in stretch.emit():  # an embedding or a head by itself
            pass
        return True

    def _cross(self, crossing: Crossing, n_tokens: int) -> None:
        source, target = self._backends[crossing.source], self._backends[crossing.target]
        rows = source.to_host(crossing.array.on(crossing.source), n_tokens)
        target.load(crossing.array.on(crossing.target), rows)

    def _issue(
        self, side: Side, step: TwinStep, reads: Sequence[Twin], written: Twin, call: partial[None]
    ) -> None:
        """Run an op of one side, or note it, after what it reads has come there."""
        crossings = [
            Crossing(array, array.side, side)
            for array in reads
            if array.side is not None and array.side is not side
        ]
        for array in (*reads, written):
            array.side = side
        if self._recording is not None:
            self._recording.add(side, crossings, (*reads, written), call)
            return
        for crossing in crossings:
            self._cross(crossing, step.n_tokens)
        call()

    # --- ops ----------------------------------------------------------------------------------
    def embed(self, step: TwinStep, table: PlacedWeight, scale: float, h: Twin) -> None:
        """h[T, D] = table[token_ids] * scale."""
        side = table.side
        op = self._backends[side].embed
        self._issue(side, step, (), h, partial(op, step.on(side), table.own, scale, h.on(side)))

    def norm_linear(
        self, step: TwinStep, h: Twin, norm: Norm | None, linears: Sequence[Linear], y: Twin
    ) -> None:
        """y[T, sum N] = concatenation of the linears of norm(h)."""
        side = _side_of(linears[0])
        own = [_linear(linear, side) for linear in linears]
        op = self._backends[side].norm_linear
        call = partial(op, step.on(side), h.on(side), _norm(norm, side), own, y.on(side))
        self._issue(side, step, (h,), y, call)

    def rope_append(
        self,
        step: TwinStep,
        y: Twin,
        heads: Heads,
        rope: Rope | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        kv: PlacedKvLayer,
    ) -> None:
        """Norm and rotate queries and keys; append keys and values to the cache."""
        side = kv.side
        norms = _norm(q_norm, side), _norm(k_norm, side)
        op = self._backends[side].rope_append
        call = partial(op, step.on(side), y.on(side), heads, rope, *norms, kv.own)
        self._issue(side, step, (y,), y, call)

    def attend(
        self, step: TwinStep, y: Twin, attention: Attention, kv: PlacedKvLayer, o: Twin
    ) -> None:
        """o[T, H dh]: causal softmax attention over each span's slot."""
        side = kv.side
        own = replace(attention, sinks=_on(attention.sinks, side))
        op = self._backends[side].attend
        call = partial(op, step.on(side), y.on(side), own, kv.own, o.on(side))
        self._issue(side, step, (y,), o, call)

    def linear_add(
        self,
        step: TwinStep,
        x: Twin,
        linear: Linear,
        post_norm: Norm | None,
        h: Twin,
        scale: float = 1.0,
    ) -> None:
        """h[T, D] += scale * post_norm(linear(x))."""
        side = _side_of(linear)
        own = _linear(linear, side), _norm(post_norm, side)
        op = self._backends[side].linear_add
        call = partial(op, step.on(side), x.on(side), *own, h.on(side), scale)
        self._issue(side, step, (x, h), h, call)

    def norm_gate_up(
        self,
        step: TwinStep,
        h: Twin,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: str,
        a: Twin,
    ) -> None:
        """a[T, F] = activation(gate(norm(h))) * up(norm(h)); without a gate, of up alone."""
        side = _side_of(up)
        own_gate = None if gate is None else _linear(gate, side)
        own = _norm(norm, side), own_gate, _linear(up, side)
        op = self._backends[side].norm_gate_up
        call = partial(op, step.on(side), h.on(side), *own, activation, a.on(side))
        self._issue(side, step, (h,), a, call)

    def moe_add(
        self,
        step: TwinStep,
        h: Twin,
        norm: Norm,
        router: Linear,
        experts: Sequence[Expert],
        top_k: int,
        normalize: bool,
        activation: str,
        scale: float = 1.0,
    ) -> None:
        """h[T, D] += scale * sum over the chosen experts of probability * expert(norm(h))."""
        side = _side_of(router)
        own = [
            Expert(*(_linear(part, side) for part in (expert.gate, expert.up, expert.down)))
            for expert in experts
        ]
        op = self._backends[side].moe_add
        call = partial(
            op, step.on(side), h.on(side), _norm(norm, side), _linear(router, side), own,
            top_k, normalize, activation, scale,
        )  # fmt: skip
        self._issue(side, step, (h,), h, call)

    def norm_head(
        self,
        step: TwinStep,
        h: Twin,
        norm: Norm,
        head: Linear,
        scale: float,
        logits: Twin,
        softcap: float | None = None,
    ) -> None:
        """logits[R, V] = head(norm(h[rows])) * scale, soft-capped."""
        side = _side_of(head)
        own = _norm(norm, side), _linear(head, side)
        op = self._backends[side].norm_head
        call = partial(op, step.on(side), h.on(side), *own, scale, logits.on(side), softcap)
        self._issue(side, step, (h,), logits, call)

    def pick(self, logits: Twin, requests: Sequence[PickRequest]) -> list[Pick]:
        """Choose one id per row, where the logits are."""
        side = logits.side
        assert side is not None
        return self._backends[side].pick(logits.on(side), requests)

    # --- ceilings -----------------------------------------------------------------------------
    def measure_bandwidth(self) -> float:
        """What both memories give together if each weight is read once, one after the other."""
        return self._together(lambda backend: backend.measure_bandwidth())

    def measure_flops(self) -> float:
        """What both give together if each multiplies its own weights, one after the other."""
        return self._together(lambda backend: backend.measure_flops())

    def _together(self, rate: Callable[[Backend], float]) -> float:
        rates = {side: rate(backend) for side, backend in self._backends.items()}
        time = sum(self._bytes[side] / rates[side] for side in Side)
        return sum(self._bytes.values()) / time if time else min(rates.values())


def _side_of(linear: Linear) -> Side:
    assert isinstance(linear.weight, PlacedWeight)
    return linear.weight.side


def _on(array: Both | None, side: Side) -> Array:
    return None if array is None else array.on(side)


def _linear(linear: Linear, side: Side) -> Linear:
    assert isinstance(linear.weight, PlacedWeight)
    return Linear(linear.weight.own, _on(linear.bias, side))


def _norm(norm: Norm | None, side: Side) -> Any:  # noqa: ANN401 - a norm where one was given
    if norm is None:
        return None
    return replace(norm, gamma=norm.gamma.on(side), beta=_on(norm.beta, side))
