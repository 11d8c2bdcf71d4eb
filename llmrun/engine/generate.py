"""The two phases of inference as functions, and the loop that joins them: ids in, events out.

``prefill`` runs a prompt through the model in chunks; ``decode_step`` feeds one id to each of
several sequences; ``generate`` is the whole of one answer. Stamps are taken here, where the id
becomes known, never at the consumer. Ids are recorded in the cache when they have been fed, so an
answer may be stopped anywhere and continued by prefix reuse.
"""

import time
from collections.abc import Callable, Collection, Generator, Sequence

from llmrun.engine.cache import KvCache
from llmrun.engine.events import Clock, Finish, Phase, PrefillParts, TokenEvent
from llmrun.engine.model import Model
from llmrun.engine.sampler import Sampler
from llmrun.errors import InternalError, ModelFileError, UsageError
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
    try:
        return model.backend.pick(logits, requests)
    except InternalError:
        for slot in slots:
            cache.truncate(slot, 0)
        raise


def generate(
    model: Model,
    cache: KvCache,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    *,
    stop_ids: Collection[int],
    max_tokens: int | None,
    slot: int = 0,
    clock: Clock = time.monotonic_ns,
    interrupt: Interrupt = never,
    on_progress: Progress | None = None,
) -> Generator[TokenEvent, None, Finish]:
    """Answer a prompt: one event per generated id, the stop id included; return why it ended.

    The slot's common prefix with the prompt is not computed again. ``max_tokens`` None: until
    the context is full. The id of the last event has not been fed, so the cache holds the prompt
    and all ids before it.

    ``interrupt`` is polled before each prefill chunk and each decode step; the return value is
    then ``Finish.INTERRUPTED``, and every id that was generated has had its event.

    On the first ``next``: UsageError for an empty prompt or ``max_tokens`` below 1, ContextError
    for a prompt longer than the context, ModelFileError for an id the model does not have.
    Later: InternalError for logits that are not finite.
    """
    entered_ns = clock()
    _check_request(model, cache, prompt_ids, max_tokens)
    cached = cache.reuse(slot, prompt_ids)
    looked_up_ns = clock()
    logits = prefill(
        model, cache, prompt_ids[cached:], slot, interrupt=interrupt, on_progress=on_progress
    )
    if logits is None:
        return Finish.INTERRUPTED
    model.backend.synchronize()  # or the prefill still running would count as sampling
    prefilled_ns = clock()

    generated: list[int] = []
    resumed_ns = entered_ns
    phase, parts = Phase.PREFILL, None
    while True:
        pick = choose(model, cache, [slot], logits, [sampler.request(generated)])[0]
        time_ns = clock()
        generated.append(pick.token_id)
        position = cache.length(slot)
        finish = _finish(
            stop=pick.token_id in stop_ids,
            length=len(generated) == max_tokens,
            context=position == cache.capacity,
        )
        if phase is Phase.PREFILL:
            parts = PrefillParts(
                start_ns=entered_ns,
                lookup_ns=looked_up_ns - entered_ns,
                prefill_ns=prefilled_ns - looked_up_ns,
                sample_ns=time_ns - prefilled_ns,
                prompt_tokens=len(prompt_ids),
                cached_tokens=cached,
            )
        step_ns = time_ns - resumed_ns
        yield TokenEvent(
            pick.token_id, time_ns, step_ns, phase, pick.logprob, position, finish, parts, pick.top
        )
        resumed_ns = clock()
        if finish is not None:
            return finish
        if interrupt():
            return Finish.INTERRUPTED
        phase, parts = Phase.DECODE, None
        logits = decode_step(model, cache, [slot], [pick.token_id], interrupt=interrupt)
        if logits is None:
            return Finish.INTERRUPTED


def _finish(*, stop: bool, length: bool, context: bool) -> Finish | None:
    # Of several reasons the model's own comes first: a stop id at the limit is a stop.
    if stop:
        return Finish.STOP
    if length:
        return Finish.LENGTH
    return Finish.CONTEXT if context else None


def _check_request(
    model: Model, cache: KvCache, prompt_ids: Sequence[int], max_tokens: int | None
) -> None:
    if not prompt_ids:
        raise UsageError("The prompt is empty.", "Give at least one word of prompt.")
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(
            f"--max-tokens {max_tokens} is out of range.", "Give --max-tokens 1 or more."
        )
    cache.check_prompt(len(prompt_ids))
    wrong = next(
        (i for i in (min(prompt_ids), max(prompt_ids)) if not 0 <= i < model.spec.vocab), None
    )
    if wrong is not None:
        raise ModelFileError(
            f"The tokenizer made id {wrong}, but the model has {model.spec.vocab} ids.",
            "Tokenizer and weights do not belong together: pull the model again.",
        )
