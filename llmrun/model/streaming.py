"""A decoder that runs layer by layer: sequences wait as hidden states while layers pass through.

For models whose weights are looked at, not kept: at any moment one layer (or embedding, or head)
is in memory, beside the states. Chunk by chunk the ops are those of ``Decoder``, so the logits are
the same bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Dense, Form, rows
from llmrun.kernels.host import HostArray
from llmrun.kernels.ops import Array, Backend, KvLayer, Linear, Norm, Span, Step, Weight
from llmrun.model.decoder import MAX_TOKENS
from llmrun.model.layer import LayerBinder, Workspace, issue
from llmrun.model.observed import Observed, Observer
from llmrun.model.parameters import EMBEDDING, FINAL_NORM, HEAD, layer_name
from llmrun.model.spec import DecoderSpec
from llmrun.quant.activations import noisy

Tensors = Mapping[str, Form]
"""Parameters by canonical name."""

LOGIT_BYTES = 32 << 20
"""Of logits computed at a time."""


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some tokens of a sequence, from ``position`` on, and their hidden states [n, D]."""

    sequence: int
    ids: tuple[int, ...]
    position: int
    stage: int
    h: Array


@dataclass(frozen=True, eq=False)
class _Scratch:
    """Memory that holds nothing between two calls."""

    step: Step
    y: Array
    o: Array
    a: Array
    kv: KvLayer


@dataclass(frozen=True, eq=False)
class Ending:
    """A model's final norm and head, bound: in memory as long as somebody holds it."""

    norm: Norm
    head: Linear


@dataclass(frozen=True, eq=False)
class Rows:
    """Logits F32 [R, V] of consecutive positions of a sequence; valid until the next ones."""

    sequence: int
    positions: range
    logits: HostArray


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states F32 [n, D] of a sequence from ``position`` on; valid until the next layer."""

    sequence: int
    position: int
    values: HostArray


def nothing() -> None:
    """Do nothing."""


class LayerStream:
    """Sequences on their way through a decoder. ``embed`` first, then each layer in order.

    ``kv_form``: how keys and values are held, as in a cache. ``between`` is called before each
    chunk and may raise to end the work. Tensors are canonical names to forms; each call binds the
    ones it needs and drops them (an ``ending`` is its holder's). ModelFileError for ids the model
    does not have.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        backend: Backend,
        sequences: Sequence[Sequence[int]],
        *,
        kv_form: str = "f16",
        max_tokens: int = MAX_TOKENS,
        between: Callable[[], None] = nothing,
    ) -> None:
        _check(spec, sequences)
        self.spec = spec
        self.backend = backend
        self._between = between
        self._max_tokens = max_tokens
        self._chunks = [
            chunk
            for number, ids in enumerate(sequences)
            for chunk in _chunks(spec, backend, number, ids, max_tokens)
        ]
        heads = spec.heads
        longest = max(map(len, sequences))
        self._scratch = _Scratch(
            step=backend.step(max_tokens),
            y=backend.empty((max_tokens, (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim)),
            o=backend.empty((max_tokens, heads.n_heads * heads.head_dim)),
            a=backend.empty((max_tokens, spec.intermediate)),
            kv=backend.kv_layer(1, longest, heads, kv_form),
        )

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(chunk.ids) for chunk in self._chunks)

    def embed(self, tensors: Tensors) -> None:
        """Begin: look every id up. Only the rows that occur are brought into memory."""
        ids = sorted({token_id for chunk in self._chunks for token_id in chunk.ids})
        place = {token_id: row for row, token_id in enumerate(ids)}
        table = self.backend.weight(rows(tensors[EMBEDDING], ids))
        self.backend.synchronize()
        for chunk in self._chunks:
            self._between()
            self._set(chunk, [place[token_id] for token_id in chunk.ids])
            self.backend.embed(self._scratch.step, table, self.spec.embedding_scale, chunk.h)
        self._finish()

    def run_layer(self, number: int, tensors: Tensors, observer: Observer | None = None) -> None:
        """Run a layer over all sequences; ``observer`` sees the inputs of its linears."""
        spec, scratch = self.spec, self._scratch
        weights, vectors = self._taken(tensors, layer_name(number, ""))
        layer = LayerBinder(spec, weights, vectors).layer(number)
        self.backend.synchronize()
        ops = self.backend
        if observer is not None:
            names = {id(weight): name for name, weight in weights.items()}
            ops = cast(Backend, Observed(ops, names, observer, self._max_tokens))
        for chunk in self._chunks:
            self._between()
            self._set(chunk, chunk.ids)
            work = Workspace(chunk.h, scratch.y, scratch.o, scratch.a)
            rope = layer.spec.rope_at(chunk.stage)
            issue(ops, scratch.step, spec, layer, rope, scratch.kv, work)
        self._finish()

    def ending(self, tensors: Tensors) -> Ending:
        """Bind final norm and head (or the embedding it is tied to), apart from all layers."""
        last = FINAL_NORM.removesuffix(".weight")
        beginning = EMBEDDING if self.spec.tied else HEAD
        weights, vectors = self._taken(tensors, beginning, f"{last}.")
        (head,) = weights.values()
        norm = LayerBinder(self.spec, weights, vectors).norm(last)
        self._finish()
        return Ending(norm, Linear(head))

    @property
    def rows_at_once(self) -> int:
        """Positions whose logits are computed at a time."""
        return max(1, min(self._max_tokens, LOGIT_BYTES // (4 * self.spec.vocab)))

    def logits(self, ending: Ending, first: int = 0) -> Iterator[Rows]:
        """End: the logits of all positions from ``first`` on, some rows at a time."""
        at_once = self.rows_at_once
        logits = self.backend.empty((at_once, self.spec.vocab))
        for chunk in self._chunks:
            for start in range(max(0, first - chunk.position), len(chunk.ids), at_once):
                self._between()
                picked = range(start, min(start + at_once, len(chunk.ids)))
                self._set(chunk, chunk.ids, picked)
                self._norm_head(ending, chunk.h, logits)
                positions = range(chunk.position + picked.start, chunk.position + picked.stop)
                host = self.backend.to_host(logits, len(picked))
                yield Rows(chunk.sequence, positions, host)
        self._finish()

    def read(self, ending: Ending, states: HostArray) -> HostArray:
        """Logits F32 [R, V] of hidden states F32 [R, D] from any layer, R <= ``rows_at_once``."""
        count = states.shape[0]
        h = self.backend.empty((count, self.spec.hidden))
        self.backend.load(h, states)
        logits = self.backend.empty((count, self.spec.vocab))
        # A step wants ids and positions, but norm and head look at neither.
        self._scratch.step.set([0] * count, [Span(0, 0, count, 0)], range(count))
        self._norm_head(ending, h, logits)
        return self.backend.to_host(logits, count)

    def states(self) -> Iterator[States]:
        """The hidden states, chunk by chunk, sequence after sequence."""
        for chunk in self._chunks:
            values = self.backend.to_host(chunk.h, len(chunk.ids))
            yield States(chunk.sequence, chunk.position, values)

    def add_noise(self, relative: float, *seed: int) -> None:
        """Multiply every value of the states by 1 + u, u uniform within ``relative``.

        The same for the same ``seed``: a caller that does it after every layer counts them in it.
        """
        for number, chunk in enumerate(self._chunks):
            values = self.backend.to_host(chunk.h, len(chunk.ids))
            self.backend.load(chunk.h, noisy(values, relative, (*seed, number)))

    def fork(self) -> "LayerStream":
        """The same sequences with states of their own, to go another way from here on."""
        other = object.__new__(LayerStream)
        other.__dict__.update(self.__dict__)
        other._chunks = [replace(chunk, h=self._copied(chunk)) for chunk in self._chunks]
        return other

    def _copied(self, chunk: _Chunk) -> Array:
        copy = self.backend.empty((len(chunk.ids), self.spec.hidden))
        self.backend.load(copy, self.backend.to_host(chunk.h, len(chunk.ids)))
        return copy

    def _taken(
        self, tensors: Tensors, *beginnings: str
    ) -> tuple[dict[str, Weight], dict[str, Array]]:
        """Bring parameters whose names begin in one of these ways to the backend."""
        weights: dict[str, Weight] = {}
        vectors: dict[str, Array] = {}
        for name, form in tensors.items():
            if not name.startswith(beginnings):
                continue
            if len(form.shape) == 2:
                weights[name] = self.backend.weight(form)
            else:
                assert isinstance(form, Dense)
                vectors[name] = self.backend.vector(form.w)
        return weights, vectors

    def _norm_head(self, ending: Ending, h: Array, logits: Array) -> None:
        spec, step = self.spec, self._scratch.step
        scale, cap = spec.logit_scale, spec.logit_cap
        self.backend.norm_head(step, h, ending.norm, ending.head, scale, logits, cap)

    def _set(self, chunk: _Chunk, ids: Sequence[int], picked: Sequence[int] = ()) -> None:
        span = Span(0, 0, len(ids), chunk.position)
        self._scratch.step.set(ids, [span], picked)

    def _finish(self) -> None:
        self.backend.synchronize()
        self.backend.release()


def _check(spec: DecoderSpec, sequences: Sequence[Sequence[int]]) -> None:
    for ids in sequences:
        if not ids:
            raise ValueError("a sequence without tokens")
        wrong = next((i for i in (min(ids), max(ids)) if not 0 <= i < spec.vocab), None)
        if wrong is not None:
            raise ModelFileError(
                f"the tokenizer made id {wrong}, but the model has {spec.vocab} ids",
                "tokenizer and weights do not belong together: pull the model again",
            )


def _chunks(
    spec: DecoderSpec, backend: Backend, number: int, ids: Sequence[int], max_tokens: int
) -> Iterator[_Chunk]:
    stage = spec.rope_stage(len(ids))
    for start in range(0, len(ids), max_tokens):
        part = tuple(ids[start : start + max_tokens])
        yield _Chunk(number, part, start, stage, backend.empty((len(part), spec.hidden)))
