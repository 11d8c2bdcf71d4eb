"""The two phases of inference as functions, and the choice between them.

``prefill`` runs a prompt through the model in chunks; ``decode_step`` feeds one id to each of
several sequences; ``choose`` takes an id from each row of their logits. Ids are recorded in the
cache when they have been fed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llmrun.engine.cache import KvCache
from llmrun.engine.model import Model
from llmrun.errors import InternalError
from llmrun.kernels.ops import Array, Interrupt, Pick, PickRequest, Span, never

Progress = Callable[[int, int], None]
"""Called with prompt ids computed so far and in all (cached ids are in neither)."""


def prefill(
    model: Model,
    cache: KvCache,
    token_ids: Sequence[int],
    slot: int = 0,
    *,
    interrupt: Interrupt = never,
    on_progress: Progress | None = None,
) -> Array | None:
    """Feed ids to a slot in chunks; return the logits [1, V] after the last, None if interrupted.

    ``interrupt`` is polled before each chunk and between layers. The device may still be working
    on the last chunk when this returns. ContextError, before any compute, if the ids do not fit
    behind what the slot holds. What the slot holds is fed again if the sequence outgrows the
    rotation of its keys.
    """
    cache.check_room(slot, len(token_ids))
    if cache.outgrown(slot, len(token_ids)):
        token_ids = [*cache.ids(slot), *token_ids]
        cache.truncate(slot, 0)
    stage = model.spec.rope_stage(cache.length(slot) + len(token_ids))
    return _feed(model, cache, token_ids, slot, stage, interrupt, on_progress)


def _feed(
    model: Model,
    cache: KvCache,
    token_ids: Sequence[int],
    slot: int,
    stage: int,
    interrupt: Interrupt,
    on_progress: Progress | None,
) -> Array | None:
    total = len(token_ids)
    logits: Array | None = None
    for start in range(0, total, model.max_tokens):
        if interrupt():
            return None
        if on_progress is not None:
            model.backend.synchronize()  # progress tells what is done, not what is queued
            on_progress(start, total)
        chunk = token_ids[start : start + model.max_tokens]
        is_last = start + len(chunk) == total
        span = Span(slot, 0, len(chunk), cache.length(slot))
        rows = [len(chunk) - 1] if is_last else []
        logits = model.forward(chunk, [span], cache.layers, rows, interrupt, stage)
        if logits is None:
            return None
        cache.append(slot, chunk, stage)
    if on_progress is not None:
        model.backend.synchronize()
        on_progress(total, total)
    return logits


def decode_step(
    model: Model,
    cache: KvCache,
    slots: Sequence[int],
    token_ids: Sequence[int],
    *,
    interrupt: Interrupt = never,
) -> Array | None:
    """Feed one id to each slot, all in one pass; return the logits [len(slots), V].

    Slots are distinct, no more than the model was built to give rows of logits for, and their
    lengths call for the same rotation (ValueError). ContextError, before any compute, if one is
    full. A slot that outgrows the rotation of its keys is fed again first, which takes as long as
    its prefill; only then ``interrupt`` is asked, and None comes back if it says yes.
    """
    for slot in slots:
        cache.check_room(slot, 1)
    stages = {0}
    if model.spec.rope_limits:
        stages = {model.spec.rope_stage(cache.length(slot) + 1) for slot in slots}
    if len(stages) > 1:
        raise ValueError(
            f"lengths {[cache.length(slot) for slot in slots]} are rotated differently"
        )
    (stage,) = stages
    for slot in slots if model.spec.rope_limits else ():
        if cache.outgrown(slot, 1):
            held = cache.ids(slot)
            cache.truncate(slot, 0)
            if _feed(model, cache, held, slot, stage, interrupt, None) is None:
                return None
    spans = [Span(slot, row, 1, cache.length(slot)) for row, slot in enumerate(slots)]
    rows = list(range(len(slots)))
    logits = model.forward(token_ids, spans, cache.layers, rows, never, stage)
    assert logits is not None  # the step itself is never interrupted
    for slot, token_id in zip(slots, token_ids, strict=True):
        cache.append(slot, [token_id], stage)
    return logits


def choose(
    model: Model,
    cache: KvCache,
    slots: Sequence[int],
    logits: Array,
    requests: Sequence[PickRequest],
) -> list[Pick]:
    """Choose the next id of each slot from its row of logits.

    InternalError if a row is not finite. K and V may then be bad too and nobody can tell since
    when, so these slots are emptied: no later prompt may build on them.
    """
    with emptied_on_error(cache, slots):
        return model.backend.pick(logits, requests)


@contextmanager
def emptied_on_error(cache: KvCache, slots: Sequence[int]) -> Iterator[None]:
    """Around a choice: empty the slots if it raises InternalError."""
    try:
        yield
    except InternalError:
        for slot in slots:
            cache.truncate(slot, 0)
        raise
