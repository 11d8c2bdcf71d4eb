"""Joins the rooms: a model's name in, everything a conversation needs out.

Free of typer and rich, so that tests and benchmarks assemble the same way. One straight line:
resolve, fetch, open, choose a scheme, (quantize,) bind a backend, build, tokenizer, template.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.cli import tuned
from llmrun.cli.apart import Stopped, apart, beside, check
from llmrun.cli.choice import (
    Choice,
    CopyOptions,
    change,
    choose_scheme,
    plan_weights,
)
from llmrun.cli.conversation import Conversation, open_conversation
from llmrun.cli.copies import STAYS, is_kept_in_store, made_while_loading, refuse_unused
from llmrun.cli.fetching import fetch_model, recommended_scheme
from llmrun.cli.fitting import Fitted, Wanted, fit, form_kind
from llmrun.cli.settings import Settings
from llmrun.cli.source import Source, open_source
from llmrun.cli.threads import ThreadChoice, choose_threads
from llmrun.engine.cache import KvCache
from llmrun.engine.sampler import SamplingOptions
from llmrun.errors import UnavailableError
from llmrun.kernels import cuda, dispatch
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import KV_FORMS, Backend, CpuOptions
from llmrun.model.decoder import Decoder, build
from llmrun.model.spec import DecoderSpec
from llmrun.quant.audit import Coverage, CoverageBuilder
from llmrun.quant.recipe import Planned
from llmrun.quant.scheme import Scheme
from llmrun.store.model import LocalModel
from llmrun.store.progress import Progress
from llmrun.text.limits import RenderLimits
from llmrun.text.render_process import RenderProcess
from llmrun.text.template import ChatTemplate, renderer

if TYPE_CHECKING:
    from llmrun.text.tokenizer import Tokenizer

ONE_OFF = ("fetch", "quantize")
"""Parts of the first load only, when a model is brought here: no part of its loading time."""

BUILD = "tokenizer+weights"
"""The part in which both are built, side by side."""


@dataclass(frozen=True)
class LoadOptions:
    """What the user asked for. ``ctx`` and threads None: decided here and said.

    ``chat``: the template will be used, so its process starts while the weights load. ``offload``:
    layers that do not fit on a card may stay on the CPU.
    """

    model: str
    quant: str = "auto"
    device: str = "auto"
    ctx: int | None = None
    kv: str = "auto"
    offload: bool = False
    threads: int | None = None
    threads_prefill: int | None = None
    threads_decode: int | None = None
    huge_pages: bool = True
    cpu_isa: str | None = None
    revision: str | None = None
    requantize: bool = False
    calibrate: str = "auto"
    target_bpw: float | None = None
    allow_partial: bool = False
    template: Path | None = None
    chat: bool = True


@dataclass(frozen=True)
class LoadTimes:
    """Milliseconds of each part, one after the other; ``beside_ms``: of the works that share the
    part ``BUILD``. ``total_ms`` leaves out what only the first load does.
    """

    parts_ms: Mapping[str, float]
    beside_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_ms(self) -> float:
        """The loading time: without download and quantizing."""
        return sum(ms for part, ms in self.parts_ms.items() if part not in ONE_OFF)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to answer.

    ``notes`` are worth a line on stderr (what was made, reduced or left out); ``decisions`` what
    was chosen where the user left the choice open. ``template_note`` and ``stops`` (stop strings)
    belong to a fallback chat template and count for conversations only.
    """

    local: LocalModel
    scheme: str
    coverage: Coverage
    spec: DecoderSpec
    decoder: Decoder
    backend: Backend
    tokenizer: "Tokenizer"
    template: ChatTemplate
    stop_ids: frozenset[int]
    sampling: SamplingOptions
    context: int
    kv_form: str
    times: LoadTimes
    notes: tuple[str, ...] = field(default=())
    decisions: tuple[str, ...] = field(default=())
    stops: tuple[str, ...] = field(default=())
    template_note: str | None = None

    def new_cache(self, n_slots: int = 1) -> KvCache:
        """An empty KV cache of the chosen context."""
        return KvCache(self.backend, self.spec, n_slots, self.context, self.kv_form)

    def close(self) -> None:
        """End the template's process."""
        self.template.close()


def load(
    options: LoadOptions,
    settings: Settings,
    progress: Progress,
    process: RenderProcess | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Load a model ready to answer. Every refusal is an LlmrunError with its exit code.

    ``process``: from ``template.renderer``, perhaps started; closed with the model. ``say`` is told
    what a person should know before the wait for the weights.
    """
    process = process or renderer(RenderLimits())
    if options.chat:
        process.start()  # first of all, for it takes as long as much of what follows
    try:
        with _no_collections():
            return _load(options, settings, progress, process, say)
    except BaseException:
        process.close()
        raise


def _load(
    options: LoadOptions,
    settings: Settings,
    progress: Progress,
    process: RenderProcess,
    say: Callable[[str], None],
) -> LoadedModel:
    clock = _Stopwatch()
    kv_form = _kv_form(options.kv)
    device = dispatch.choose_device(options.device)
    threads = choose_threads(options.threads, options.threads_prefill, options.threads_decode)
    exact = options.quant == "none"
    cpu = CpuOptions(threads.decode, options.cpu_isa, options.huge_pages, exact)
    backend = dispatch.bind(device, threads.prefill, cpu)
    measured = tuned.use(backend, settings)
    clock.lap("bind")
    local = fetch_model(options.model, settings, progress, options.revision)
    clock.lap("fetch")
    original = source = open_source(local.path, exact=exact)
    recommended = recommended_scheme(local)
    choice = choose_scheme(options.quant, source, recommended, options.requantize, backend.isa)
    wanted = Wanted(choice, source, kv_form, options.ctx, options.target_bpw)
    make_host = partial(dispatch.bind, "cpu", threads.prefill, cpu) if options.offload else None
    fitted = fit(wanted, backend, make_host)
    if fitted.price is not None:
        say(fitted.price)
    notes = [*source.checkpoint.notes, *_larger(choice, source, backend), *fitted.notes]
    if slower := _why_slower(backend):
        notes.append(slower)
    clock.lap("open")
    scheme = choice.scheme
    copying = CopyOptions(options.calibrate, options.target_bpw, options.allow_partial)
    if is_kept_in_store(choice, source):
        from llmrun.cli.quantizing import Order, quantized_copy

        reader = partial(dispatch.bind, device, threads.prefill, CpuOptions(isa=options.cpu_isa))
        asked = Order(local, source, choice, copying, reader)
        source, made = apart(lambda stopped: quantized_copy(asked, settings, progress, stopped))
        choice = Choice(None, choice.name, choice.note)
        notes += made
        clock.lap("quantize")
    elif scheme is None:
        refuse_unused(copying, STAYS)
    else:
        why = made_while_loading(source)
        refuse_unused(copying, why)
        if scheme.weighted:
            notes.append(f"no calibration text was read: {why}")
    bound = (choice, scheme, source, fitted, options)
    beside_ms: dict[str, float] = {}

    def build_weights(stopped: Stopped) -> tuple[Decoder, Coverage]:
        with _timed(beside_ms, "weights"):
            return _build(*bound, stopped)

    def build_conversation(stopped: Stopped) -> Conversation:
        with _timed(beside_ms, "tokenizer"):
            return open_conversation(local.path, original, options.template, process)

    (decoder, coverage), conversation = beside(build_weights, build_conversation)
    clock.lap(BUILD)
    if coverage.partial:
        notes.append(_partial_note(coverage))
    notes += threads.notes
    return LoadedModel(
        local=local,
        scheme=choice.name,
        coverage=coverage,
        spec=source.binding.spec,
        decoder=decoder,
        backend=fitted.backend,
        tokenizer=conversation.tokenizer,
        template=conversation.template,
        stop_ids=conversation.stop_ids,
        sampling=conversation.sampling,
        context=fitted.context,
        kv_form=kv_form,
        times=LoadTimes(clock.parts_ms, beside_ms),
        notes=tuple(notes),
        decisions=(
            choice.note,
            *_decisions(options, original, fitted.backend, threads),
            *((measured,) if measured else ()),
        ),
        stops=conversation.stops,
        template_note=conversation.template_note,
    )


def _larger(choice: Choice, source: Source, backend: Backend) -> list[str]:
    """What takes more memory than the file suggests."""
    kept = choice.scheme is None
    if kept and source.opened():
        return ["weights that no kernel computes with as they are stored are plain numbers now"]
    if choice.untouched:
        return []  # asked for, and -q none is known to take more
    kinds = {kind for _, _, kind in source.weights().values() if backend.widening(form_kind(kind))}
    if kept and kinds:
        named = ", ".join(kind.upper() for kind in sorted(kinds))  # as GGUF writes them
        return [f"{named} weights take 4 bits more each in memory than they need"]
    return []


def _build(
    choice: Choice,
    asked: Scheme | None,
    source: Source,
    fitted: Fitted,
    options: LoadOptions,
    stopped: Stopped,
) -> tuple[Decoder, Coverage]:
    backend = fitted.backend
    planned = plan_weights(choice, source, resident=True)
    coverage = CoverageBuilder(asked)
    counted = _counted(choice, source, planned, coverage, fitted, stopped)
    tensors = source.tensors(counted)
    decoder = build(source.binding.spec, tensors, backend, max_tokens=backend.prefill_tokens)
    backend.synchronize()  # a backend may have put work on the weights off
    return decoder, coverage.finish(allow_partial=options.allow_partial)


def _counted(
    choice: Choice,
    source: Source,
    planned: Mapping[str, Planned],
    coverage: CoverageBuilder,
    fitted: Fitted,
    stopped: Stopped,
) -> Callable[[str, Form], Form]:
    """Brings each weight into its form just before it is handed to the backend."""
    parameters = source.binding.parameters

    def brought(name: str, form: Form) -> Form:
        check(stopped)
        role = parameters[name].role
        result = change(choice, role, planned[name], name, form)
        fitted.place(name)
        coverage.add(name, role, result, planned[name], fitted.backend.widening(result.kind))
        return result

    return brought


def _kv_form(wanted: str) -> str:
    if wanted == "auto":
        return "f16"
    if wanted in KV_FORMS:
        return wanted
    raise UnavailableError(
        f"--kv {wanted} is not available", f"use --kv auto or one of: {', '.join(KV_FORMS)}"
    )


def _decisions(
    options: LoadOptions, source: Source, backend: Backend, threads: ThreadChoice
) -> list[str]:
    decisions = _left_out(source.binding.unused)
    if options.device == "auto":
        why = _why_no_gpu() if backend.device == "cpu" else None
        decisions.append(
            f"device {backend.device} ({kernels_of(backend)}{f'; {why}' if why else ''})"
        )
    if backend.device.endswith("cpu"):
        decode = (
            "" if threads.decode in (None, threads.prefill) else f", {threads.decode} to decode"
        )
        decisions.append(f"{threads.prefill} threads{decode} ({threads.why})")
    return decisions


def _why_no_gpu() -> str | None:
    """Why the GPU that seems to be here is not used; None if there is no sign of one."""
    return dispatch.problem("cuda") if cuda.has_nvidia_driver() else None


def _why_slower(backend: Backend) -> str | None:
    """Why a GPU computes with others' kernels and not with ours; None if that is not so."""
    if not backend.device.startswith("cuda"):
        return None
    asked = dispatch.candidates(backend.device)
    reason = next((one.reason for one in asked if one.info.name == "gpu"), None)
    if reason is None:
        return None
    return f"llmrun's own GPU kernels, several times faster, are not used: {reason}"


def _left_out(unused: Mapping[str, str]) -> list[str]:
    """One line for each reason: a model that sees has hundreds of tensors for that alone."""
    names: dict[str, list[str]] = {}
    for name, why in unused.items():
        names.setdefault(why, []).append(name)
    return [
        f"{first}{f' and {len(more)} more' if more else ''} left out: {why}"
        for why, (first, *more) in names.items()
    ]


def kernels_of(backend: Backend) -> str:
    """Which kernels compute, in words."""
    return f"{backend.name} kernels{f' for {backend.isa}' if backend.isa else ''}"


def _partial_note(coverage: Coverage) -> str:
    return (
        f"some weights stay dense: {coverage.actual_bits:.2f} bits per weight instead of the "
        f"{coverage.requested_bits:.2f} the scheme promises"
    )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without looking for garbage meanwhile: a vocabulary makes 100,000 objects and no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _timed(taken_ms: dict[str, float], name: str) -> Iterator[None]:
    start_ns = time.monotonic_ns()
    yield
    taken_ms[name] = (time.monotonic_ns() - start_ns) / 1e6


class _Stopwatch:
    """Milliseconds between laps, by name."""

    def __init__(self) -> None:
        self.parts_ms: dict[str, float] = {}
        self._last = time.monotonic_ns()

    def lap(self, part: str) -> None:
        now = time.monotonic_ns()
        self.parts_ms[part] = (now - self._last) / 1e6
        self._last = now
