"""The ids of an answer behind its first: each comes from feeding the one before.

Where the backend chains steps, an id is fed back on the device, and the next step is issued before
the id is read here: the device never waits for the host. The step ahead is dropped when the answer
ends; what it wrote lies behind the slot's length. Elsewhere each id passes through the host. Both
record the same ids in the cache at the same time.
"""

from collections.abc import Generator, Sequence
from contextlib import closing

from llmrun.engine.cache import KvCache
from llmrun.engine.model import Model
from llmrun.engine.phases import choose, decode_step, emptied_on_error
from llmrun.engine.sampler import Sampler
from llmrun.kernels.ops import Chain, Interrupt, Pick, Span

AHEAD = 2
"""Steps issued and not read: the one being waited for and the next."""


def continued(
    model: Model,
    cache: KvCache,
    slot: int,
    sampler: Sampler,
    said: Sequence[int],
    max_tokens: int | None,
    interrupt: Interrupt,
) -> Generator[Pick, None, None]:
    """Yield the choice behind ``said``, the answer so far, again and again; end if interrupted.

    The caller adds each id to ``said`` before it asks for the next, and asks for no more than
    ``max_tokens`` in all and the context allow. ``interrupt`` is asked before each step.
    """
    has_chains = True
    while not interrupt():
        n_steps = _steps_alike(model, cache, slot)
        if max_tokens is not None:
            n_steps = min(n_steps, max_tokens - len(said))
        chain = None
        if has_chains and n_steps > 0:
            chain = _chain(model, cache, slot, sampler, said)
            has_chains = chain is not None
        if chain is not None:
            if not (yield from _read_ahead(chain, model, cache, slot, said, n_steps, interrupt)):
                return
            continue
        logits = decode_step(model, cache, [slot], said[-1:], interrupt=interrupt)
        if logits is None:
            return
        yield choose(model, cache, [slot], logits, [sampler.request(said)])[0]


def _steps_alike(model: Model, cache: KvCache, slot: int) -> int:
    """Steps that fit behind what the slot holds and leave its keys rotated as they are."""
    if cache.outgrown(slot, 1):
        return 0
    length = cache.length(slot)
    limits = (limit for limit in model.spec.rope_limits if limit > length)
    return min([cache.capacity, *limits]) - length


def _chain(
    model: Model, cache: KvCache, slot: int, sampler: Sampler, said: Sequence[int]
) -> Chain | None:
    length = cache.length(slot)
    span = Span(slot, 0, 1, length)
    request = sampler.request(said)
    stage = model.spec.rope_stage(length + 1)
    return model.chain(said[-1:], [span], cache.layers, [request], stage)


def _read_ahead(
    chain: Chain,
    model: Model,
    cache: KvCache,
    slot: int,
    said: Sequence[int],
    n_steps: int,
    interrupt: Interrupt,
) -> Generator[Pick, None, bool]:
    """Yield the choices of at most ``n_steps`` steps; return False if interrupted.

    A chain that somebody closed ends early: what was read is recorded, so nothing is lost.
    """
    stage = model.spec.rope_stage(cache.length(slot) + 1)
    issued = 0
    with closing(chain):
        for read in range(n_steps):
            if read > 0 and interrupt():
                return False
            if not chain.open:
                break
            while issued < min(read + AHEAD, n_steps):
                chain.queue()
                issued += 1
            with emptied_on_error(cache, [slot]):
                pick = chain.read()[0]
            cache.append(slot, said[-1:], stage)
            yield pick
    return True
