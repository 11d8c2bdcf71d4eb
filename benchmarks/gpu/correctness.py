"""Section ``correctness``: the kernels beside the reference, and beside themselves.

Products of every storage form and width; whole tiny models of every kind of layer, in prefill and
decode; bits that must not change: from run to run, with the number of rows beside one's own, with
or without a graph. What waits for the device where it must not is an error here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from gpu.bench import Bench
from gpu.compare import compare
from gpu.forms import KINDS, random_form
from gpu.journal import Values
from gpu.launches import Launch, fill, launch, with_rows
from gpu.run import Case, Run, WrongError
from gpu.shapes import Linears
from llmrun.engine.cache import KvCache
from llmrun.engine.phases import decode_step, prefill
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.gpu.arrays import Prepared
from llmrun.kernels.gpu.backend import GpuBackend
from llmrun.kernels.ops import Array
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import architectures
from llmrun.model.decoder import Decoder, build
from llmrun.model.parameters import expected
from llmrun.model.spec import DecoderSpec

SHAPES = (
    Linears("qkv", (192, 64, 64), 512, 1),
    Linears("o", (320,), 1152, 1),
    Linears("o", (72,), 1408, 1),
    Linears("gate_up", (448, 448), 256, 1),
    Linears("head", (1000,), 256, 1),
)
WIDTHS = (1, 2, 8, 16, 32)
REPEATS = 20
DRY_KINDS = ("w4 g128",)

ARCHITECTURES = (
    "llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "olmo2", "cohere2", "phi3",
    "starcoder2", "granite", "exaone4",
)  # fmt: skip
MODEL_TOLERANCE = 3e-2
"""Logits of a whole model whose products' inputs are rounded to bf16."""

PARALLEL = 3


@dataclass(frozen=True)
class Course:
    """Tokens of the prompt, steps of one sequence, steps of ``parallel`` ones."""

    prompt: int = 100
    steps: int = 6
    together: int = 6
    parallel: int = PARALLEL


DRY = Course(33, 1, 1, 2)


def run(run: Run) -> None:
    """Check."""
    for case in cases(run.bench):
        run.case(case)


def cases(bench: Bench) -> Iterator[Case]:
    """Products by form, then models by architecture."""
    for kind in DRY_KINDS if bench.dry else KINDS:
        if not kind.endswith("order"):  # a step of its own puts those inputs in order
            work = partial(_products, bench, kind)
            yield Case(f"products {kind}", work, work)
    for name in ARCHITECTURES[:1] if bench.dry else ARCHITECTURES:
        work = partial(_model, bench, name)
        yield Case(f"model {name}", work, work)


# --- products ---------------------------------------------------------------------------------
def _products(bench: Bench, kind: str) -> Values:
    """Every role and width; the bits of row 0 must be the same in all."""
    errors = []
    for linears in SHAPES[1:2] if bench.dry else SHAPES:
        one = launch(bench, linears, kind, 1, copies=1)
        rows = []
        for m in WIDTHS[:2] if bench.dry else WIDTHS:
            wide = with_rows(one, m)
            errors.append(wide.check())
            _check_onto(wide)
            rows.append(wide.y[0].clone())
        if any(not torch.equal(row, rows[0]) for row in rows):
            raise WrongError(f"{linears}: row 0 depends on how many rows there are")
        _check_repeats(one, 2 if bench.dry else REPEATS)
    return {"error": float(f"{max(errors):.2g}")}


def _check_repeats(one: Launch, repeats: int) -> None:
    found = []
    for _ in range(repeats):
        one.y.zero_()
        one.run(one.copies[0])
        found.append(one.y[: one.m].clone())
    if any(not torch.equal(y, found[0]) for y in found):
        raise WrongError(f"{one.linears}: not the same bits in {repeats} runs")


def _check_onto(one: Launch) -> None:
    """What the next linear will read: of the values that were written, exactly."""
    if one.linears.role not in ("o", "gate_up"):
        return
    m, n = one.m, one.y.shape[1]
    wanted = Prepared.empty(n, one.y.device)
    fill(wanted, one.y[:m])
    if not torch.equal(one.onto.u[:m], wanted.u[:m]):
        raise WrongError(f"{one.linears}: the prepared inputs are not the rounded values")
    if one.linears.role == "o":
        compare(one.onto.squares[:m], wanted.squares[:m], 1e-5)


# --- models -----------------------------------------------------------------------------------
def _model(bench: Bench, name: str) -> Values:
    """Prefill, single steps and steps of several sequences beside the reference; graphs too."""
    arch = architectures()[name]
    errors = []
    for config in arch.tiny[:1]:
        spec = arch.spec(arch.text(config) if arch.text else config)
        if bench.dry:
            spec = replace(spec, layers=spec.layers[:1])
        held = dict(_weights(spec))
        course = DRY if bench.dry else Course()
        reference = _logits(build_on(TorchBackend("cpu", 4), spec, held), course)
        ours = _logits(build_on(GpuBackend(str(bench.device)), spec, held), course)
        errors.append(compare(ours, reference, MODEL_TOLERANCE))
        if bench.dry:
            break  # graphs are not to be had
        plain = _logits(build_on(GpuBackend(str(bench.device), eager=True), spec, held), course)
        if not torch.equal(ours, plain):
            raise WrongError("not the same bits with graphs and without")
    return {"error": float(f"{max(errors):.2g}")}


def build_on(backend: object, spec: DecoderSpec, held: dict[str, Form]) -> Decoder:
    """The decoder on a backend."""
    return build(spec, held.items(), backend, max_tokens=128, max_rows=PARALLEL)  # type: ignore[arg-type]


def _weights(spec: DecoderSpec) -> Iterator[tuple[str, Form]]:
    """Random parameters, as int4 and int8 where the shape allows it."""
    random = torch.Generator().manual_seed(0)
    for number, (name, parameter) in enumerate(expected(spec).items()):
        shape = parameter.shape
        if len(shape) == 1:
            yield name, Dense(to_host(torch.randn(shape, generator=random) * 0.1 + 0.9))
            continue
        n, k = shape
        whole = k % 32 == 0
        kind = ("w4 g32", "w8 row", "bf16", "w8 g32 +min")[number % 4] if whole else "bf16"
        yield name, random_form(kind, (n, k))


def _logits(decoder: Decoder, course: Course) -> torch.Tensor:
    """After a prefill, of steps of one sequence, and of steps of several; ids are the same."""
    spec, parallel = decoder.spec, course.parallel
    cache = KvCache(decoder.backend, spec, parallel, 2 * course.prompt, "f32")
    random = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, spec.vocab, (course.prompt,), generator=random).tolist()
    rows = [_host(decoder, prefill(decoder, cache, prompt), 1)]
    for step in range(course.steps):
        with _unwaiting(step > 1 and spec.mixture is None):
            logits = decode_step(decoder, cache, [0], [prompt[step]])
        rows.append(_host(decoder, logits, 1))
    for slot in range(1, parallel):
        prefill(decoder, cache, prompt[: 7 * slot], slot)
    for step in range(course.together):
        fed = prompt[step : step + parallel]
        rows.append(_host(decoder, decode_step(decoder, cache, [*range(parallel)], fed), parallel))
    return torch.cat(rows)


@contextmanager
def _unwaiting(checked: bool) -> Iterator[None]:
    """An error for whoever makes the host wait for all of the device's work; mixtures have to.

    To wait for an event is none: a step waits like this until its last upload is through.
    """
    if not (checked and torch.cuda.is_available()):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _host(decoder: Decoder, logits: Array | None, n_rows: int) -> torch.Tensor:
    return as_tensor(decoder.backend.to_host(logits, n_rows)).clone()
