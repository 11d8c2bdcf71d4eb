"""The ops of a layer that show the inputs of every linear before they use them.

``Observed`` stands in for a backend in ``layer.issue``. What it shows are host arrays, made by the
backend's own ops and the norms of ``quant.activations``; it changes nothing of the result.
"""

from collections.abc import Callable, Mapping, Sequence

from llmrun.kernels.host import HostArray
from llmrun.kernels.ops import Array, Backend, Expert, Linear, Norm, Span, Step
from llmrun.quant.activations import normed, routed, taken

Observer = Callable[[Sequence[str], HostArray], None]
"""Is told the weights' canonical names of linears that share an input, and that input F32 [T, K].

The array is valid during the call. Each expert of a mixture is shown the tokens it gets.
"""


class Observed:
    """A backend whose linears are watched. ``names``: of each weight, by its id.

    ``max_tokens`` of a step.
    """

    def __init__(
        self, backend: Backend, names: Mapping[int, str], observer: Observer, max_tokens: int
    ) -> None:
        self._backend = backend
        self._names = names
        self._observer = observer
        self._max_tokens = max_tokens
        self._step = backend.step(max_tokens)

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)  # the ops without a linear

    def norm_linear(
        self, step: Step, h: Array, norm: Norm | None, linears: Sequence[Linear], y: Array
    ) -> None:
        """Watched: the linears."""
        self._show(linears, self._normed(step, h, norm))
        self._backend.norm_linear(step, h, norm, linears, y)

    def linear_add(
        self,
        step: Step,
        x: Array,
        linear: Linear,
        post_norm: Norm | None,
        h: Array,
        scale: float = 1.0,
    ) -> None:
        """Watched: the linear."""
        self._show([linear], self._backend.to_host(x, step.n_tokens))
        self._backend.linear_add(step, x, linear, post_norm, h, scale)

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
        """Watched: gate and up."""
        self._show([up] if gate is None else [gate, up], self._normed(step, h, norm))
        self._backend.norm_gate_up(step, h, norm, gate, up, activation, a)

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
        """Watched: the router, and each expert's linears with the tokens it gets."""
        ops, n_tokens = self._backend, step.n_tokens
        x = self._normed(step, h, norm)
        self._show([router], x)
        scores = ops.empty((self._max_tokens, len(experts)))
        ops.norm_linear(step, h, norm, [router], scores)
        states = ops.to_host(h, n_tokens)
        own = ops.empty((self._max_tokens, states.shape[1]))
        inner = ops.empty((self._max_tokens, experts[0].up.weight.shape[0]))
        chosen = routed(ops.to_host(scores, n_tokens), top_k)
        for expert, rows in zip(experts, chosen, strict=True):
            if not rows:
                continue
            self._show([expert.gate, expert.up], taken(x, rows))
            ops.load(own, taken(states, rows))
            self._step.set([0] * len(rows), [Span(0, 0, len(rows), 0)], [])
            ops.norm_gate_up(self._step, own, norm, expert.gate, expert.up, activation, inner)
            self._show([expert.down], ops.to_host(inner, len(rows)))
        ops.moe_add(step, h, norm, router, experts, top_k, normalize, activation, scale)

    def _show(self, linears: Sequence[Linear], x: HostArray) -> None:
        self._observer([self._names[id(linear.weight)] for linear in linears], x)

    def _normed(self, step: Step, h: Array, norm: Norm | None) -> HostArray:
        x = self._backend.to_host(h, step.n_tokens)
        if norm is None:
            return x
        width = x.shape[1]
        beta = None if norm.beta is None else self._backend.to_host(norm.beta, width)
        return normed(
            x,
            self._backend.to_host(norm.gamma, width),
            beta,
            eps=norm.eps,
            offset=norm.offset,
            centered=norm.centered,
        )
