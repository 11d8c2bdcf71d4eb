"""Sequences that outgrow the rotation of their keys, on a tiny decoder with LongRoPE.

The limit is 32 tokens. The oracle is a prefill of the whole sequence into an empty cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from llmrun.engine.cache import KvCache
from llmrun.engine.events import Finish
from llmrun.engine.generate import generate
from llmrun.engine.phases import decode_step, prefill
from llmrun.engine.sampler import Sampler
from llmrun.kernels.forms import Dense
from llmrun.kernels.ops import Interrupt, KvLayer, Sampling, Span, never
from llmrun.kernels.reference.arrays import to_host
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.archs.phi3 import ARCH
from llmrun.model.decoder import Decoder, build
from llmrun.model.parameters import expected

LIMIT, CHUNK = 32, 8
IDS = [(7 * i * i + 3 * i) % 131 for i in range(64)]


class Counting:
    """A decoder that remembers how many tokens each pass had, and of which stage."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.backend, self.spec, self.max_tokens = decoder.backend, decoder.spec, CHUNK
        self.passes: list[tuple[int, int]] = []
        self.done = 0

    def forward(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        kv: Sequence[KvLayer],
        rows: Sequence[int],
        interrupt: Interrupt = never,
        stage: int = 0,
    ) -> Any:
        self.passes.append((len(token_ids), stage))
        logits = self.decoder.forward(token_ids, spans, kv, rows, interrupt, stage)
        self.done += 1
        return logits

    def chain(self, *of: Any) -> None:
        """None, as on every host."""


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    spec = ARCH.spec(ARCH.tiny[1])
    assert spec.rope_limits == (LIMIT,)
    random = torch.Generator().manual_seed(0)
    tensors = (
        (name, Dense(to_host(torch.randn(parameter.shape, generator=random) * 0.3)))
        for name, parameter in expected(spec).items()
    )
    return build(spec, tensors, TorchBackend("cpu", 1), max_tokens=CHUNK, max_rows=2)


@pytest.fixture
def model(decoder: Decoder) -> Any:
    return Counting(decoder)


def new_cache(model: Any, capacity: int = 64) -> KvCache:
    return KvCache(model.backend, model.spec, 2, capacity, "f32")


def copied(logits: Any, n_rows: int = 1) -> torch.Tensor:
    assert logits is not None
    return logits[:n_rows].clone()


def afresh(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits behind these ids, from an empty cache."""
    logits = prefill(model.decoder, new_cache(model), ids)
    return copied(logits)


def after(n_passes: int, model: Any) -> Interrupt:
    """An interrupt that says yes once so many more passes were made."""
    end = model.done + n_passes
    return lambda: model.done >= end


def within(n_passes: int, model: Any) -> Interrupt:
    """An interrupt that says yes between two layers of the last of so many more passes."""
    end = len(model.passes) + n_passes
    return lambda: len(model.passes) >= end


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_two_rotations_differ(model: Any) -> None:
    ids = IDS[:CHUNK]
    cache = new_cache(model)
    span = [Span(0, 0, CHUNK, 0)]
    short = copied(model.forward(ids, span, cache.layers, [CHUNK - 1], stage=0))
    long = copied(model.forward(ids, span, cache.layers, [CHUNK - 1], stage=1))
    assert (short - long).norm() / short.norm() > 0.05


def test_r089_decoding_past_the_limit_equals_a_prefill_at_every_step(model: Any) -> None:
    cache = new_cache(model)
    prefill(model, cache, IDS[:30])
    model.passes.clear()
    for length in range(30, 35):
        got = copied(decode_step(model, cache, [0], [IDS[length]]))
        same(got, afresh(model, IDS[: length + 1]))
        assert cache.ids(0) == tuple(IDS[: length + 1])
    # 32 tokens are fed again, once, when the 33rd comes.
    short, long = [(1, 0)] * 2, [(1, 1)] * 3
    assert model.passes == [*short, *[(CHUNK, 1)] * 4, *long]


def test_r089_a_second_turn_past_the_limit_is_read_anew(model: Any) -> None:
    cache = new_cache(model)
    prefill(model, cache, IDS[:20])
    turn = IDS[:40]
    assert cache.reuse(0, turn) == 0
    model.passes.clear()
    same(copied(prefill(model, cache, turn)), afresh(model, turn))
    assert model.passes == [(CHUNK, 1)] * 5
    # The third turn is as long, so it keeps what is there.
    assert cache.reuse(0, IDS[:48]) == 40
    same(copied(prefill(model, cache, IDS[40:48])), afresh(model, IDS[:48]))
    # Back to a short one: nothing of the long rotation is kept.
    assert cache.reuse(0, IDS[:10]) == 0
    same(copied(prefill(model, cache, IDS[:10])), afresh(model, IDS[:10]))


def test_r089_more_of_a_prompt_feeds_again_what_the_slot_holds(model: Any) -> None:
    cache = new_cache(model)
    prefill(model, cache, IDS[:20])
    model.passes.clear()
    same(copied(prefill(model, cache, IDS[20:40])), afresh(model, IDS[:40]))
    assert model.passes == [(CHUNK, 1)] * 5
    assert cache.ids(0) == tuple(IDS[:40])


def test_r089_answers_do_not_depend_on_where_the_limit_fell(model: Any) -> None:
    sampler = Sampler(Sampling(), vocab=model.spec.vocab)

    def answer(prompt: list[int], max_tokens: int, cache: KvCache) -> list[int]:
        source = generate(
            model, cache, prompt, sampler, stop_ids=frozenset(), max_tokens=max_tokens
        )
        return [event.token_id for event in source]

    cache = new_cache(model)
    said = answer(IDS[:28], 10, cache)  # crosses the limit while it answers
    assert len(said) == 10
    for n_kept in range(10):
        assert answer([*IDS[:28], *said[:n_kept]], 1, new_cache(model)) == [said[n_kept]]


@pytest.mark.parametrize(
    ("interrupt", "n_passes", "n_held"),
    [(after, 0, 0), (after, 1, 8), (after, 3, 24), (within, 1, 0), (within, 3, 16)],
)
def test_an_interrupt_while_feeding_again_leaves_a_true_cache(
    model: Any, interrupt: Callable[[int, Any], Interrupt], n_passes: int, n_held: int
) -> None:
    cache = new_cache(model)
    prefill(model, cache, IDS[:LIMIT])
    assert decode_step(model, cache, [0], [IDS[32]], interrupt=interrupt(n_passes, model)) is None
    assert cache.ids(0) == tuple(IDS[:n_held])
    # The next turn may be long again: what was fed is of its rotation and stays.
    assert cache.reuse(0, IDS[:34]) == n_held
    same(copied(prefill(model, cache, IDS[n_held:34])), afresh(model, IDS[:34]))


def test_after_such_an_interrupt_a_short_turn_keeps_nothing(model: Any) -> None:
    cache = new_cache(model)
    prefill(model, cache, IDS[:20])
    assert prefill(model, cache, IDS[20:40], interrupt=after(2, model)) is None
    assert cache.ids(0) == tuple(IDS[:16])
    assert cache.reuse(0, IDS[:20]) == 0
    same(copied(prefill(model, cache, IDS[:20])), afresh(model, IDS[:20]))


def test_an_interrupted_answer_says_so(model: Any) -> None:
    cache = new_cache(model)
    sampler = Sampler(Sampling(), vocab=model.spec.vocab)
    # 4 passes read the prompt of 31, one feeds the first id; the next one feeds all again.
    source = generate(
        model,
        cache,
        IDS[:31],
        sampler,
        stop_ids=frozenset(),
        max_tokens=9,
        interrupt=after(6, model),
    )
    next(source)
    next(source)
    with pytest.raises(StopIteration) as end:  # both ids that were chosen were reported
        next(source)
    assert end.value.value is Finish.INTERRUPTED
    assert cache.length(0) == CHUNK


def test_a_fork_takes_the_rotation_with_it(model: Any) -> None:
    cache = new_cache(model)
    prefill(model, cache, IDS[:40], 0)
    prefill(model, cache, IDS[:5], 1)
    cache.fork(0, 1)
    model.passes.clear()
    got = copied(decode_step(model, cache, [0, 1], [IDS[40], IDS[41]]), 2)
    assert model.passes == [(2, 1)]  # nothing is fed again
    same(got[:1], afresh(model, IDS[:41]))
    same(got[1:], afresh(model, [*IDS[:40], IDS[41]]))


def test_a_fork_of_a_short_sequence_into_a_long_slot(model: Any) -> None:
    cache = new_cache(model)
    prefill(model, cache, IDS[:40], 1)
    prefill(model, cache, IDS[:LIMIT], 0)
    cache.fork(0, 1)
    model.passes.clear()
    same(copied(decode_step(model, cache, [1], [IDS[32]])), afresh(model, IDS[:33]))
    assert model.passes == [*[(CHUNK, 1)] * 4, (1, 1)]
    assert cache.ids(0) == tuple(IDS[:LIMIT])


def test_slots_on_both_sides_of_the_limit_are_refused(model: Any) -> None:
    cache = new_cache(model)
    prefill(model, cache, IDS[:40], 0)
    prefill(model, cache, IDS[:5], 1)
    with pytest.raises(ValueError, match="rotated differently"):
        decode_step(model, cache, [0, 1], [1, 2])
    assert (cache.length(0), cache.length(1)) == (40, 5)


def test_r090_room_for_more_does_not_change_a_short_sequence(model: Any) -> None:
    # The length of the text decides, not the size of the context.
    roomy, narrow = new_cache(model, 64), new_cache(model, 16)
    logits = [copied(prefill(model, cache, IDS[:8])) for cache in (roomy, narrow)]
    assert torch.equal(*logits)
    assert {stage for _, stage in model.passes} == {0}
