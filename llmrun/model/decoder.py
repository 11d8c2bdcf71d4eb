"""The one decoder, written in terms of the ops and driven by a spec.

It wires arrays that it never looks into. ``build`` takes the parameters one at a time, hands
each to the backend and drops it, so the peak is the resident weights plus one tensor.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.ops import (
    Array,
    Attention,
    Backend,
    Interrupt,
    KvLayer,
    Linear,
    Norm,
    Span,
    Weight,
    never,
)
from llmrun.model.parameters import EMBEDDING, FINAL_NORM, HEAD, expected, layer_name
from llmrun.model.spec import DecoderSpec, LayerSpec

MAX_TOKENS = 256
"""Tokens of one call: prefill chunks are at most this long."""

MAX_ROWS = 16
"""Rows of logits of one call: sequences decoded together."""


@dataclass(frozen=True, eq=False)
class Layer:
    """The bound arrays of one layer."""

    spec: LayerSpec
    attention: Attention
    input_norm: Norm
    qkv: tuple[Linear, Linear, Linear]
    q_norm: Norm | None
    k_norm: Norm | None
    out: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear


class Decoder:
    """A decoder bound to a backend. Make it with ``build``."""

    def __init__(
        self,
        spec: DecoderSpec,
        backend: Backend,
        embedding: Weight,
        layers: Sequence[Layer],
        final_norm: Norm,
        head: Linear,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        heads = spec.heads
        self._step = backend.step(max_tokens)
        self._h = backend.empty((max_tokens, spec.hidden))
        self._y = backend.empty(
            (max_tokens, (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim)
        )
        self._o = backend.empty((max_tokens, heads.n_heads * heads.head_dim))
        self._a = backend.empty((max_tokens, spec.intermediate))
        self._logits = backend.empty((max_rows, spec.vocab))

    def forward(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        kv: Sequence[KvLayer],
        rows: Sequence[int],
        interrupt: Interrupt = never,
    ) -> Array | None:
        """Run T tokens through all layers, append to the cache, return logits [R, V].

        ``rows`` are the token rows whose logits are wanted (none: the head is not run). The
        result is valid until the next call; None if ``interrupt`` said so between two layers, and
        what was written to the cache is then not to be counted.
        """
        has_rows = len(rows) > 0
        self._step.set(token_ids, spans, rows)
        done = self.backend.run_layers(
            self._step, kv, has_rows, lambda: self._issue(kv, has_rows), interrupt
        )
        return self._logits if done else None

    def _issue(self, kv: Sequence[KvLayer], has_rows: bool) -> Iterator[None]:
        # Nothing in here may depend on the step: backends record it.
        ops, step, h = self.backend, self._step, self._h
        ops.embed(step, self._embedding, 1.0, h)
        for layer, cache in zip(self._layers, kv, strict=True):
            ops.norm_linear(step, h, layer.input_norm, layer.qkv, self._y)
            ops.rope_append(
                step, self._y, self.spec.heads, layer.spec.rope, layer.q_norm, layer.k_norm, cache
            )
            ops.attend(step, self._y, layer.attention, cache, self._o)
            ops.linear_add(step, self._o, layer.out, None, h)
            ops.norm_gate_up(
                step, h, layer.mlp_norm, layer.gate, layer.up, self.spec.activation, self._a
            )
            ops.linear_add(step, self._a, layer.down, None, h)
            yield
        if has_rows:
            ops.norm_head(step, h, self._final_norm, self._head, 1.0, self._logits)

    @property
    def weight_bytes(self) -> int:
        """Resident bytes of all 2-D weights (a tied head counts once)."""
        head = 0 if self._head.weight is self._embedding else self._head.weight.nbytes
        return self._linear_bytes + head + self._embedding.nbytes

    @property
    def weight_bytes_per_token(self) -> int:
        """Weight bytes one decode step reads: every linear, the head, one embedding row."""
        row = self._embedding.nbytes // self._embedding.shape[0]
        return self._linear_bytes + self._head.weight.nbytes + row

    @property
    def linear_parameters(self) -> int:
        """Weights each token passes, without embedding and head."""
        return sum(w.shape[0] * w.shape[1] for w in self._linear_weights())

    @property
    def _linear_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._linear_weights())

    def _linear_weights(self) -> list[Weight]:
        return [
            linear.weight
            for layer in self._layers
            for linear in (*layer.qkv, layer.out, layer.gate, layer.up, layer.down)
        ]


def build(
    spec: DecoderSpec,
    tensors: Iterable[tuple[str, Form]],
    backend: Backend,
    *,
    max_tokens: int = MAX_TOKENS,
    max_rows: int = MAX_ROWS,
) -> Decoder:
    """Bind a stream of (canonical name, storage form) to a backend.

    ModelFileError if a parameter is missing, unknown or given twice.
    """
    wanted = expected(spec)
    weights: dict[str, Weight] = {}
    vectors: dict[str, Array] = {}
    for name, form in tensors:
        if name not in wanted or name in weights or name in vectors:
            raise ModelFileError(f"tensor {name} is unknown or came twice", "download it again")
        if len(form.shape) == 2:
            weights[name] = backend.weight(form)
        else:
            if not isinstance(form, Dense):
                raise ModelFileError(f"tensor {name} is stored as {form.kind}", "expected numbers")
            vectors[name] = backend.vector(form.w)
    missing = sorted(wanted.keys() - weights.keys() - vectors.keys())
    if missing:
        raise ModelFileError(f"parameters are missing: {', '.join(missing)}", "download it again")
    return _Binder(spec, weights, vectors).decoder(backend, max_tokens, max_rows)


@dataclass(frozen=True)
class _Binder:
    spec: DecoderSpec
    weights: dict[str, Weight]
    vectors: dict[str, Array]

    def decoder(self, backend: Backend, max_tokens: int, max_rows: int) -> Decoder:
        embedding = self.weights[EMBEDDING]
        head = Linear(embedding if self.spec.tied else self.weights[HEAD])
        layers = [self.layer(i, spec) for i, spec in enumerate(self.spec.layers)]
        return Decoder(
            self.spec, backend, embedding, layers, self.norm(FINAL_NORM), head, max_tokens, max_rows
        )

    def layer(self, index: int, layer: LayerSpec) -> Layer:
        def name(part: str) -> str:
            return layer_name(index, part)

        def linear(part: str) -> Linear:
            return Linear(
                self.weights[name(f"{part}.weight")], self.vectors.get(name(f"{part}.bias"))
            )

        def norm(part: str) -> Norm:
            return self.norm(name(f"{part}.weight"))

        scale, qk_norm = self.spec.attention_scale, self.spec.qk_norm
        return Layer(
            spec=layer,
            attention=Attention(self.spec.heads, scale, layer.window),
            input_norm=norm("input_layernorm"),
            qkv=(
                linear("self_attn.q_proj"),
                linear("self_attn.k_proj"),
                linear("self_attn.v_proj"),
            ),
            q_norm=norm("self_attn.q_norm") if qk_norm else None,
            k_norm=norm("self_attn.k_norm") if qk_norm else None,
            out=linear("self_attn.o_proj"),
            mlp_norm=norm("post_attention_layernorm"),
            gate=linear("mlp.gate_proj"),
            up=linear("mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )

    def norm(self, name: str) -> Norm:
        return Norm(self.vectors[name], self.spec.norm_eps)
