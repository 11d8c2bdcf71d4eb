"""The whole of one answer: a prompt's ids in, events out.

Stamps are taken here, where an id becomes known, never at the consumer. Ids are recorded in the
cache when they have been fed, so an answer may be stopped anywhere and continued by prefix reuse.
"""

import time
from collections.abc import Collection, Generator, Sequence
from contextlib import closing

from llmrun.engine.cache import KvCache
from llmrun.engine.continuation import continued
from llmrun.engine.events import Clock, Finish, Phase, PrefillParts, TokenEvent
from llmrun.engine.model import Model
from llmrun.engine.phases import Progress, choose, prefill
from llmrun.engine.sampler import Sampler
from llmrun.errors import ModelFileError, UsageError
from llmrun.kernels.ops import Interrupt, Pick, never


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
    pick: Pick | None = choose(model, cache, [slot], logits, [sampler.request(generated)])[0]
    with closing(
        continued(model, cache, slot, sampler, generated, max_tokens, interrupt)
    ) as following:
        while pick is not None:
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
            yield TokenEvent(
                pick.token_id, time_ns, time_ns - resumed_ns, phase, pick.logprob, position,
                finish, parts, pick.top,
            )  # fmt: skip
            resumed_ns = clock()
            if finish is not None:
                return finish
            phase, parts = Phase.DECODE, None
            pick = next(following, None)
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
