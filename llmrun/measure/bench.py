"""Measure one model on one shape of request: repeats after a warm-up, everything recorded.

The prompt is synthetic and given as ids, there are no stop ids, choice is greedy: every repeat does
the same work. The engine is consumed by a list, so waits are next to nothing; if they are not, or
a number rests on too few values, the record says so.
"""

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from llmrun.engine.cache import KvCache
from llmrun.engine.events import Clock
from llmrun.engine.generate import generate
from llmrun.engine.model import Model
from llmrun.engine.phases import prefill
from llmrun.engine.sampler import Sampler, SamplingOptions, resolve
from llmrun.errors import UsageError
from llmrun.measure.ceilings import Ceilings
from llmrun.measure.environment import Environment, peak_host_bytes
from llmrun.measure.record import BenchRecord, distribution
from llmrun.measure.roofline import decode_work, judge, prefill_work
from llmrun.measure.statistics import MAX_WAIT_SHARE, RequestStats, share, summarize


@dataclass(frozen=True)
class Shape:
    """What is asked: ``prompt_tokens`` behind ``depth_tokens`` that are already in the cache,
    then ``output_tokens``; ``repeats`` times, after one warm-up."""

    prompt_tokens: int
    output_tokens: int
    depth_tokens: int = 0
    repeats: int = 5

    @property
    def total_tokens(self) -> int:
        """Tokens of one sequence at its end."""
        return self.depth_tokens + self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Subject:
    """What is measured, as its owner knows it.

    ``vocab`` is the number of ids the tokenizer has; ``special_ids`` stay out of the prompt.
    """

    model: str
    revision: str | None
    scheme: str
    bits_per_weight: float
    load_ms: float
    vocab: int
    special_ids: Collection[int] = ()


def bench(
    model: Model,
    cache: KvCache,
    subject: Subject,
    shape: Shape,
    ceilings: Ceilings,
    env: Environment,
    *,
    seed: int = 0,
    clock: Clock = time.monotonic_ns,
) -> BenchRecord:
    """Measure; return the record.

    Slot 0 of ``cache`` is emptied and used. The prompt follows from ``seed`` alone. UsageError for
    a shape that asks for nothing, or for more tokens than the cache holds.
    """
    _check(shape, cache)
    ids = synthetic_ids(subject, shape.depth_tokens + shape.prompt_tokens, seed)
    _measure_once(model, cache, subject, shape, ids, clock)
    requests = [
        _measure_once(model, cache, subject, shape, ids, clock) for _ in range(shape.repeats)
    ]
    peak_bytes = peak_host_bytes()  # before the ceilings: measuring them takes memory of its own
    record = _record(model, cache, subject, shape, ceilings, env, requests)
    for _ in range(MORE_PROBES):
        if max(record.mbu or 0.0, record.mfu or 0.0) <= 1.0:
            break
        ceilings.measure_again()  # nothing is faster than a ceiling: a neighbour disturbed it
        record = _record(model, cache, subject, shape, ceilings, env, requests)
    return replace(record, peak_host_bytes=peak_bytes)


MORE_PROBES = 3
"""How often a ceiling below what was just measured is looked for again."""


def synthetic_ids(subject: Subject, n_tokens: int, seed: int) -> list[int]:
    """Seeded random ids inside the vocabulary, none of them special."""
    special = set(subject.special_ids)
    ordinary = [i for i in range(subject.vocab) if i not in special]
    return random.Random(seed).choices(ordinary, k=n_tokens)


def _check(shape: Shape, cache: KvCache) -> None:
    for name, value, least in (
        ("prompt tokens", shape.prompt_tokens, 1),
        ("output tokens", shape.output_tokens, 1),
        ("depth", shape.depth_tokens, 0),
        ("repeats", shape.repeats, 1),
    ):
        if value < least:
            raise UsageError(f"{name.capitalize()}: {value} is too few.", f"Give {least} or more.")
    if shape.total_tokens > cache.capacity:
        raise UsageError(
            f"A request of {shape.total_tokens} tokens does not fit a cache of {cache.capacity}.",
            "Ask for fewer tokens.",
        )


def _measure_once(
    model: Model,
    cache: KvCache,
    subject: Subject,
    shape: Shape,
    ids: Sequence[int],
    clock: Clock,
) -> RequestStats:
    """One request from an idle device, with nothing but the depth in the cache."""
    cache.truncate(0, 0)
    prefill(model, cache, ids[: shape.depth_tokens])
    model.backend.synchronize()
    sampler = Sampler(resolve(SamplingOptions(seed=0)), subject.vocab)
    t_submit_ns = clock()
    events = list(
        generate(
            model,
            cache,
            ids,
            sampler,
            stop_ids=(),
            max_tokens=shape.output_tokens,
            clock=clock,
        )
    )
    return summarize(events, t_submit_ns=t_submit_ns)


def _record(
    model: Model,
    cache: KvCache,
    subject: Subject,
    shape: Shape,
    ceilings: Ceilings,
    env: Environment,
    requests: Sequence[RequestStats],
) -> BenchRecord:
    gaps = [gap for request in requests for gap in request.gaps]
    decode_ns = sum(gap.itl_ns for gap in gaps)
    wait_share = share(sum(gap.wait_ns for gap in gaps), decode_ns) or 0.0
    prefill_ns = sum(request.parts.prefill_ns for request in requests)
    computed = sum(request.computed_tokens for request in requests)
    decode = judge(decode_work(model, cache, gaps), ceilings)
    prefilling = judge([prefill_work(model, cache, request) for request in requests], ceilings)
    return BenchRecord(
        model=subject.model,
        revision=subject.revision,
        scheme=subject.scheme,
        bits_per_weight=subject.bits_per_weight,
        device=model.backend.device,
        backend=model.backend.name,
        threads=model.backend.threads,
        prompt_tokens=shape.prompt_tokens,
        generated_tokens=requests[0].generated_tokens,
        depth_tokens=shape.depth_tokens,
        batch=1,
        repeats=len(requests),
        ttft_ms=distribution([request.ttft_ns / 1e6 for request in requests]),
        itl_ms=distribution([gap.itl_ns / 1e6 for gap in gaps]),
        prefill_tokens_per_s=share(computed * 1e9, prefill_ns),
        decode_tokens_per_s=share(len(gaps) * 1e9, decode_ns),
        load_ms=subject.load_ms,
        peak_host_bytes=None,
        peak_device_bytes=None,
        weight_bytes_per_token=model.weight_bytes_per_token,
        kv_bytes_per_token=cache.bytes_per_token,
        measured_bandwidth_bytes_per_s=ceilings.bandwidth_bytes_per_s,
        mbu=decode.mbu if decode else None,
        measured_flops_per_s=ceilings.flops_per_s,
        mfu=prefilling.mfu if prefilling else None,
        prefill_verdict=prefilling,
        decode_verdict=decode,
        env=env,
        wait_share=wait_share,
        warnings=_warnings(wait_share, requests),
    )


def _warnings(wait_share: float, requests: Sequence[RequestStats]) -> tuple[str, ...]:
    warnings = []
    if wait_share > MAX_WAIT_SHARE:
        warnings.append(
            f"The engine waited {wait_share:.1%} of the decode time for its consumer: "
            "something else used the processor, measure again on an idle machine."
        )
    if len(requests) > 1 and requests[0].ttft_ns > 2 * max(r.ttft_ns for r in requests[1:]):
        warnings.append(
            "The first repeat took more than twice as long to its first token as any other: "
            "one warm-up was not enough."
        )
    return tuple(warnings)
