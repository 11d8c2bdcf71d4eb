"""A model without mathematics: it keeps time on a fake clock and answers from the ids it was fed.

Loaded by the conftest of this folder and of tests/llmrun/measure. The next id of a row is a hash of
all ids its slot holds up to there, so any mistake in spans, positions or cached prefixes changes
the answer. Work is queued as on a GPU: its time passes only when someone waits for it. With
``chains`` a model feeds its choices back by itself, as a GPU does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from llmrun.kernels.ops import Heads, Interrupt, Pick, PickRequest, Span, never
from llmrun.model.spec import DecoderSpec, LayerSpec, NormSpec

MS = 1_000_000

KvLayer = Any


@dataclass
class FakeClock:
    """A clock that only moves when told."""

    now_ns: int = 1_000 * MS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, ns: int) -> None:
        self.now_ns += ns


@dataclass
class FakeBackend:
    """Knows how long a pick takes and which work is still queued."""

    clock: FakeClock
    pick_ns: int
    name: str = "fake"
    device: str = "cpu"
    threads: int = 1
    isa: str | None = None
    queued_ns: int = 0
    copies: list[tuple[KvLayer, int, int, int]] = field(default_factory=list)
    requests: list[PickRequest] = field(default_factory=list)
    pick_error: Exception | None = None
    bandwidth: float = 1e9
    flops: float = 1e12

    def kv_layer(self, n_slots: int, capacity: int, heads: Heads, form: str) -> KvLayer:
        return SimpleNamespace(nbytes=n_slots * capacity * heads.n_kv_heads * heads.head_dim * 4)

    def kv_copy(self, layer: KvLayer, source: int, target: int, n_tokens: int) -> None:
        self.copies.append((layer, source, target, n_tokens))

    def synchronize(self) -> None:
        self.clock.advance(self.queued_ns)
        self.queued_ns = 0

    def pick(self, logits: list[int], requests: Sequence[PickRequest]) -> list[Pick]:
        self.synchronize()
        self.clock.advance(self.pick_ns)
        self.requests.extend(requests)
        if self.pick_error is not None:
            raise self.pick_error
        return [Pick(token_id, -0.5) for token_id in logits]

    def measure_bandwidth(self) -> float:
        return self.bandwidth

    def measure_flops(self) -> float:
        return self.flops


@dataclass
class FakeModel:
    """Prefill costs ``prefill_ns`` per id, a decode step ``step_ns``.

    ``script`` gives the ids in order instead of the hash; ``on_forward`` runs inside each call.
    """

    backend: FakeBackend
    spec: DecoderSpec
    prefill_ns: int = 1 * MS
    step_ns: int = 10 * MS
    max_tokens: int = 4
    weight_bytes: int = 3_000_000
    weight_bytes_per_token: int = 2_000_000
    linear_parameters: int = 1_000_000
    script: list[int] | None = None
    on_forward: Callable[[], None] = lambda: None
    chains: bool = False
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    calls: list[tuple[list[int], list[Span], list[int]]] = field(default_factory=list)
    opened: list["FakeChain"] = field(default_factory=list)

    def forward(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        kv: Sequence[KvLayer],
        rows: Sequence[int],
        interrupt: Interrupt = never,
        stage: int = 0,
    ) -> list[int] | None:
        assert 0 < len(token_ids) <= self.max_tokens
        self._end_chain()
        return self._run(token_ids, spans, rows)

    def chain(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        kv: Sequence[KvLayer],
        requests: Sequence[PickRequest],
        stage: int = 0,
    ) -> "FakeChain | None":
        self._end_chain()
        if not self.chains:
            return None
        now = [replace(request, history=tuple(request.history)) for request in requests]
        self.opened.append(FakeChain(self, list(token_ids), list(spans), now, stage))
        return self.opened[-1]

    def _end_chain(self) -> None:
        if self.opened:
            self.opened[-1].close()

    def _run(
        self, token_ids: Sequence[int], spans: Sequence[Span], rows: Sequence[int]
    ) -> list[int]:
        self.calls.append((list(token_ids), list(spans), list(rows)))
        self.on_forward()
        is_step = all(span.count == 1 for span in spans) and bool(rows)
        self.backend.queued_ns += self.step_ns if is_step else self.prefill_ns * len(token_ids)
        where = {}
        for span in spans:
            for i in range(span.count):
                place = (span.slot, span.position + i)
                self.memory[place] = token_ids[span.start + i]
                where[span.start + i] = place
        assert sorted(where) == list(range(len(token_ids)))
        return [self.next_id(*where[row]) for row in rows]

    def next_id(self, slot: int, position: int) -> int:
        if self.script is not None:
            return self.script.pop(0)
        held = [self.memory[slot, p] for p in range(position + 1)]
        return crc32(repr(held).encode()) % self.spec.vocab


@dataclass
class FakeChain:
    """Steps of a FakeModel that feed their choices back. It fails if it is misused."""

    model: FakeModel
    token_ids: list[int]
    spans: list[Span]
    requests: list[PickRequest]
    stage: int
    open: bool = True
    issued: int = 0
    unread: list[tuple[int, list[int]]] = field(default_factory=list)
    most_unread: int = 0

    def queue(self) -> None:
        assert self.open
        backend = self.model.backend
        before_ns = backend.queued_ns
        rows = list(range(len(self.spans)))
        self.token_ids = self.model._run(self.token_ids, self.spans, rows)
        self.spans = [replace(span, position=span.position + 1) for span in self.spans]
        backend.requests += [replace(r, draw=r.draw + self.issued) for r in self.requests]
        backend.queued_ns += backend.pick_ns
        self.issued += 1
        self.unread.append((backend.queued_ns - before_ns, self.token_ids))
        self.most_unread = max(self.most_unread, len(self.unread))

    def read(self) -> list[Pick]:
        assert self.open
        took_ns, token_ids = self.unread.pop(0)
        backend = self.model.backend
        backend.clock.advance(took_ns)
        backend.queued_ns -= took_ns
        if backend.pick_error is not None:
            raise backend.pick_error
        return [Pick(token_id, -0.5) for token_id in token_ids]

    def close(self) -> None:
        self.open = False


def make_spec(windows: Sequence[int | None] = (None, None), max_positions: int = 64) -> DecoderSpec:
    return DecoderSpec(
        architecture="fake",
        vocab=100,
        hidden=8,
        intermediate=16,
        heads=Heads(n_heads=4, n_kv_heads=2, head_dim=2),
        layers=tuple(LayerSpec(rope=None, window=window) for window in windows),
        norm=NormSpec(1e-5),
        activation="silu",
        attention_scale=1.0,
        max_positions=max_positions,
        tied=True,
    )


def make_model(windows: Sequence[int | None] = (None, None), **changes: object) -> FakeModel:
    """A model on a clock of its own: 1 ms per prompt id, 10 ms per step, 2 ms per pick."""
    backend = FakeBackend(FakeClock(), pick_ns=2 * MS)
    return FakeModel(backend, make_spec(windows), **changes)  # type: ignore[arg-type]
