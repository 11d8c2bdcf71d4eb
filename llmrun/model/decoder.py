"""The one decoder, written in terms of the ops and driven by a spec.

It wires arrays that it never looks into. ``build`` takes the parameters one at a time, hands
each to the backend and drops it, so the peak is the resident weights plus one tensor.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.ops import (
    Array,
    Backend,
    Chain,
    Interrupt,
    KvLayer,
    Linear,
    Norm,
    PickRequest,
    Span,
    Weight,
    never,
)
from llmrun.model.layer import Layer, LayerBinder, Mlp, Workspace, issue
from llmrun.model.parameters import EMBEDDING, FINAL_NORM, HEAD, expected
from llmrun.model.spec import DecoderSpec

MAX_TOKENS = 256
"""Tokens of one call: prefill chunks are at most this long."""

MAX_ROWS = 32
"""Rows of logits of one call: sequences decoded together."""


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
        self._work = Workspace(
            h=backend.empty((max_tokens, spec.hidden)),
            y=backend.empty((max_tokens, (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim)),
            o=backend.empty((max_tokens, heads.n_heads * heads.head_dim)),
            a=backend.empty((max_tokens, spec.intermediate)),
        )
        self._logits = backend.empty((max_rows, spec.vocab))
        self._chain: Chain | None = None

    def forward(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        kv: Sequence[KvLayer],
        rows: Sequence[int],
        interrupt: Interrupt = never,
        stage: int = 0,
    ) -> Array | None:
        """Run T tokens through all layers, append to the cache, return logits [R, V].

        ``rows`` are the token rows whose logits are wanted (none: the head is not run). ``stage``:
        ``spec.rope_stage`` of the whole length of these sequences, the same for all of them and
        for what their slots hold. The result is valid until the next call; None if ``interrupt``
        said so between two layers, and what was written to the cache is then not to be counted.
        """
        self._end_chain()
        has_rows = len(rows) > 0
        self._step.set(token_ids, spans, rows)
        done = self.backend.run_layers(
            self._step, kv, (has_rows, stage), lambda: self._issue(kv, has_rows, stage), interrupt
        )
        return self._logits if done else None

    def chain(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        kv: Sequence[KvLayer],
        requests: Sequence[PickRequest],
        stage: int = 0,
    ) -> Chain | None:
        """Decode steps that feed back their choices, one id per span; None if the backend has none.

        ``token_ids`` are fed by the first step, ``requests`` say how its choices are made. The
        chain works in this decoder's arrays: the next ``forward`` or ``chain`` closes it.
        """
        self._end_chain()
        self._step.set(token_ids, spans, range(len(token_ids)))
        self._chain = self.backend.chain(
            self._step, kv, (True, stage), lambda: self._issue(kv, True, stage), self._logits,
            requests,
        )  # fmt: skip
        return self._chain

    def _end_chain(self) -> None:
        if self._chain is not None:
            self._chain.close()
            self._chain = None

    def _issue(self, kv: Sequence[KvLayer], has_rows: bool, stage: int) -> Iterator[None]:
        # Nothing in here may depend on the step: backends record it.
        ops, step, spec = self.backend, self._step, self.spec
        ops.embed(step, self._embedding, spec.embedding_scale, self._work.h)
        for layer, cache in zip(self._layers, kv, strict=True):
            issue(ops, step, spec, layer, layer.spec.rope_at(stage), cache, self._work)
            yield
        if has_rows:
            ops.norm_head(
                step, self._work.h, self._final_norm, self._head, spec.logit_scale, self._logits,
                spec.logit_cap,
            )  # fmt: skip

    @property
    def launches(self) -> list[tuple[Linear, ...]]:
        """The linears of a decode step in order; those that read the same inputs stand together.

        Experts and routers, of which the step chooses, are left out.
        """
        found: list[tuple[Linear, ...]] = []
        for layer in self._layers:
            found += [layer.qkv, (layer.out,)]
            if isinstance(layer.mlp, Mlp):
                gate = () if layer.mlp.gate is None else (layer.mlp.gate,)
                found += [(*gate, layer.mlp.up), (layer.mlp.down,)]
        return [*found, (self._head,)]

    @property
    def weight_bytes(self) -> int:
        """Resident bytes of all 2-D weights (a tied head counts once)."""
        head = 0 if self._head.weight is self._embedding else self._head.weight.nbytes
        experts = sum(weight.nbytes for weight in self._expert_weights())
        return self._linear_bytes + experts + head + self._embedding.nbytes

    @property
    def weight_bytes_per_token(self) -> int:
        """Weight bytes one decode step reads: every linear, the chosen experts, the head, one
        embedding row."""
        row = self._embedding.nbytes // self._embedding.shape[0]
        experts = sum(weight.nbytes for weight in self._expert_weights())
        return self._linear_bytes + self._chosen(experts) + self._head.weight.nbytes + row

    @property
    def linear_parameters(self) -> int:
        """Weights each token passes, without embedding and head."""
        experts = sum(prod(weight.shape) for weight in self._expert_weights())
        return sum(prod(weight.shape) for weight in self._linear_weights()) + self._chosen(experts)

    @property
    def _linear_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._linear_weights())

    def _chosen(self, all_experts: int) -> int:
        # Experts are of one shape, so whichever are chosen, they are this share of all.
        mixture = self.spec.mixture
        return 0 if mixture is None else all_experts * mixture.top_k // mixture.n_experts

    def _linear_weights(self) -> list[Weight]:
        return [linear.weight for layer in self._layers for linear in layer.linears]

    def _expert_weights(self) -> list[Weight]:
        return [
            linear.weight
            for layer in self._layers
            for expert in layer.experts
            for linear in (expert.gate, expert.up, expert.down)
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
        del form  # or it would be held while the next one is read
    missing = sorted(wanted.keys() - weights.keys() - vectors.keys())
    if missing:
        raise ModelFileError(f"parameters are missing: {', '.join(missing)}", "download it again")
    binder = LayerBinder(spec, weights, vectors)
    embedding = weights[EMBEDDING]
    return Decoder(
        spec,
        backend,
        embedding,
        [binder.layer(number) for number in range(len(spec.layers))],
        binder.norm(FINAL_NORM.removesuffix(".weight")),
        Linear(embedding if spec.tied else weights[HEAD]),
        max_tokens,
        max_rows,
    )
