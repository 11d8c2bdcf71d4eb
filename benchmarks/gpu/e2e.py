"""Section ``e2e``: whole models through the engine's own loop: time to first token, time per token.

The weights are random, and as many bytes as those of the published model in that scheme. Before
anything is timed, one token through the decode kernels must give the logits that the prefill
kernels give for it.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import quantiles

import torch

from gpu.bench import Bench
from gpu.compare import compare
from gpu.env import clocks
from gpu.forms import random_form
from gpu.journal import Values
from gpu.run import Case, Run
from gpu.shapes import Model, models
from llmrun.engine.cache import KvCache
from llmrun.engine.events import TokenEvent
from llmrun.engine.generate import generate
from llmrun.engine.phases import decode_step, prefill
from llmrun.engine.sampler import Sampler, SamplingOptions, resolve
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.gpu.arrays import GpuKvLayer, GpuStep
from llmrun.kernels.gpu.backend import GpuBackend
from llmrun.kernels.gpu.graphs import Planned
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.model.decoder import Decoder, build
from llmrun.model.parameters import EMBEDDING, HEAD, expected
from llmrun.model.spec import DecoderSpec

SCHEMES = {
    "int4": ("w4 g128", "w8 g128"),
    "bf16": ("bf16", "bf16"),
    "nf4": ("lut g64", "bf16"),
    "int8": ("w8 row", "w8 row"),
}
"""Kinds of the linears and of the head (and of an embedding that is the head)."""

TOLERANCE = 5e-2
"""Between logits of two ways through a whole model that round to bf16 in different places."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts whose first token is timed, and of the answer."""

    prompts: tuple[int, ...] = (1024, 8192)
    answer: int = 257
    before: int = 128
    chunk: int = GpuBackend.prefill_tokens
    checked: int = 80
    repeats: int = 2


DRY = Lengths((33,), 4, 2, 64, 34, 1)


def run(run: Run) -> None:
    """Measure; what matters most comes first."""
    for case in cases(run.bench):
        run.case(case)
    run.case(Case("clocks after", clocks))


def cases(bench: Bench) -> Iterator[Case]:
    """One for each model and scheme."""
    schemes = [*SCHEMES][:1] if bench.dry else SCHEMES
    for scheme in schemes:
        for model in models(bench.dry):
            needs_s = 12.0 if model.name == "8B" else 6.0
            work = partial(_measure, bench, model, scheme)
            warm = partial(_warm, bench, model, scheme)
            yield Case(f"{model.name} {scheme}", work, warm, needs_s)


def _measure(bench: Bench, model: Model, scheme: str) -> Values:
    lengths = DRY if bench.dry else Lengths()
    subject = _subject(bench, model.spec, scheme, lengths)
    error = _agreement(subject, lengths.checked)
    first_ms = {}
    for n in lengths.prompts:
        if not bench.dry:
            subject.events(n, 2)  # compiles, and captures what is captured
        times = [_first_ms(subject.events(n, 1)) for _ in range(lengths.repeats)]
        first_ms[str(n)] = round(min(times), 2)
    if not bench.dry:
        subject.events(lengths.before, 8)
    gaps_ms = _gaps_ms(subject.events(lengths.before, lengths.answer))
    p50, p95 = (quantiles(gaps_ms, n=100, method="inclusive")[at - 1] for at in (50, 95))
    nbytes = subject.decoder.weight_bytes_per_token
    rate = bench.facts.get("read_gb_per_s")
    return {
        "itl_p50_ms": round(p50, 4),
        "itl_p95_ms": round(p95, 4),
        "tok_per_s": round(1e3 / p50, 1),
        "first_ms": first_ms,
        "weight_gb": round(nbytes / 1e9, 3),
        "of_read_ceiling": None if not rate else round(nbytes / p50 / 1e6 / rate, 3),
        "launches": max(subject.launches, default=None),
        "launches_most": 6 * len(model.spec.layers) + 3,
        "error": float(f"{error:.2g}"),
    }


def _warm(bench: Bench, model: Model, scheme: str) -> None:
    """One layer compiles what all of them need."""
    lengths = DRY if bench.dry else Lengths()
    spec = model.spec
    subject = _subject(bench, replace(spec, layers=spec.layers[:1]), scheme, lengths)
    for n in (lengths.before, *lengths.prompts):
        subject.events(n, 2 if bench.dry else 3)


@dataclass(frozen=True)
class Subject:
    """A model with its cache. ``launches``: of each decode step that was planned, those that
    choose in a chain included."""

    decoder: Decoder
    cache: KvCache
    launches: list[int] = field(default_factory=list)

    def events(self, n_prompt: int, n_answer: int) -> list[TokenEvent]:
        """Answer a prompt of random ids, greedily, with nothing cached."""
        self.cache.truncate(0, 0)
        vocab = self.decoder.spec.vocab
        sampler = Sampler(resolve(SamplingOptions(seed=0)), vocab)
        made = generate(
            self.decoder,
            self.cache,
            ids(n_prompt, vocab),
            sampler,
            stop_ids=(),
            max_tokens=n_answer,
        )
        return list(made)


def _subject(bench: Bench, spec: DecoderSpec, scheme: str, lengths: Lengths) -> Subject:
    gc.collect()  # the model before
    if not bench.dry:
        torch.cuda.empty_cache()
    backend = GpuBackend(str(bench.device))
    launches = _counted(backend)
    decoder = build(
        spec,
        weights(spec, *SCHEMES[scheme]),
        backend,  # type: ignore[arg-type]
        max_tokens=lengths.chunk,
        max_rows=1,
    )
    room = max(*lengths.prompts, lengths.before) + lengths.answer + 64
    cache = KvCache(backend, spec, 1, room)  # type: ignore[arg-type]
    return Subject(decoder, cache, launches)


def _counted(backend: GpuBackend) -> list[int]:
    """Grows by the number of launches of each decode step that is planned from now on."""
    launches: list[int] = []
    run = backend._graphs.run

    def counting(
        step: GpuStep, kv: Sequence[GpuKvLayer], key: Hashable, planned: Callable[[], Planned]
    ) -> None:
        def noted() -> Planned:
            made = planned()
            launches.append(len(made.launches))
            return made

        run(step, kv, key, noted)

    backend._graphs.run = counting  # type: ignore[method-assign]
    return launches


def weights(spec: DecoderSpec, linears: str, head: str) -> Iterator[tuple[str, Form]]:
    """Random parameters; those of one shape share their bytes on the host."""
    made: dict[tuple[str, tuple[int, ...]], Form] = {}
    for name, parameter in expected(spec).items():
        shape = parameter.shape
        if len(shape) == 1:
            yield name, Dense(to_host(torch.rand(shape) * 0.2 + 0.9))
            continue
        kind = head if name in (EMBEDDING, HEAD) else linears
        n, k = shape
        if (kind, shape) not in made:
            made[kind, shape] = random_form(kind, (n, k))
        yield name, made[kind, shape]


def ids(count: int, vocab: int) -> list[int]:
    """Random ids, the same for the same count."""
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, vocab, (count,), generator=random).tolist()


def _agreement(subject: Subject, n_tokens: int) -> float:
    """The relative error of a decode step's logits, beside prefill's of the same last token."""
    decoder, cache = subject.decoder, subject.cache
    prompt = ids(n_tokens, decoder.spec.vocab)

    def numbers(logits: object) -> torch.Tensor:
        assert logits is not None
        return as_tensor(decoder.backend.to_host(logits, 1)).clone()

    cache.truncate(0, 0)
    whole = numbers(prefill(decoder, cache, prompt))
    cache.truncate(0, 0)
    prefill(decoder, cache, prompt[:-1])
    stepped = numbers(decode_step(decoder, cache, [0], prompt[-1:]))
    return compare(stepped, whole, TOLERANCE)


def _first_ms(events: list[TokenEvent]) -> float:
    parts = events[0].parts
    assert parts is not None
    return (events[0].time_ns - parts.start_ns) / 1e6


def _gaps_ms(events: list[TokenEvent]) -> list[float]:
    """Times between tokens; the first, which may hold a graph's capture, does not count."""
    stamps = [event.time_ns for event in events[1:]]
    return [(b - a) / 1e6 for a, b in pairwise(stamps)]
