"""Joins the rooms: a model's name in, everything a conversation needs out.

Free of typer and rich, so that tests and benchmarks assemble the same way. One straight line:
resolve, fetch, open, choose a scheme, (convert,) bind a backend, build, tokenizer, template.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmrun.cli import memory
from llmrun.cli.choice import Choice, change, choose_scheme, plan_weights, weights_to_plan
from llmrun.cli.conversation import open_conversation
from llmrun.cli.conversion import Conversion, prepare, sidecars
from llmrun.cli.settings import Settings
from llmrun.cli.source import Source, open_source
from llmrun.cli.threads import usable_processors
from llmrun.engine.cache import ELEMENT_BYTES, KvCache
from llmrun.engine.sampler import SamplingOptions
from llmrun.errors import UnavailableError
from llmrun.kernels import dispatch
from llmrun.kernels.forms import Form
from llmrun.kernels.host import DType
from llmrun.kernels.ops import Backend
from llmrun.model.decoder import Decoder, build
from llmrun.model.spec import DecoderSpec
from llmrun.quant.audit import Coverage, CoverageBuilder
from llmrun.quant.recipe import Planned
from llmrun.quant.scheme import find
from llmrun.store import catalog
from llmrun.store.derived import key_for
from llmrun.store.export import export
from llmrun.store.fetch import fetch
from llmrun.store.model import LocalModel
from llmrun.store.progress import Progress
from llmrun.store.reference import resolve
from llmrun.store.store import Store
from llmrun.text.template import ChatTemplate
from llmrun.text.tokenizer import Tokenizer

CONVERSION_VERSION = "1"
"""Part of the key of quantized copies in the store: counts up when their bytes change."""


@dataclass(frozen=True)
class LoadOptions:
    """What the user asked for. ``ctx`` and ``threads`` None: decided here and said."""

    model: str
    quant: str = "auto"
    device: str = "auto"
    ctx: int | None = None
    kv: str = "auto"
    threads: int | None = None
    revision: str | None = None
    requantize: bool = False
    allow_partial: bool = False
    template: Path | None = None


@dataclass(frozen=True)
class LoadTimes:
    """Milliseconds of each part of loading; ``total_ms`` is their sum."""

    parts_ms: Mapping[str, float]

    @property
    def total_ms(self) -> float:
        """All parts."""
        return sum(self.parts_ms.values())


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to answer.

    ``notes`` are worth a line on stderr (what was made, reduced or replaced); ``decisions`` what
    was chosen where the user left the choice open.
    """

    local: LocalModel
    scheme: str
    coverage: Coverage
    spec: DecoderSpec
    decoder: Decoder
    backend: Backend
    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: frozenset[int]
    sampling: SamplingOptions
    context: int
    kv_form: str
    times: LoadTimes
    notes: tuple[str, ...] = field(default=())
    decisions: tuple[str, ...] = field(default=())
    stops: tuple[str, ...] = field(default=())
    """Stop strings of a fallback template."""

    def new_cache(self, n_slots: int = 1) -> KvCache:
        """An empty KV cache of the chosen context."""
        return KvCache(self.backend, self.spec, n_slots, self.context, self.kv_form)


def fetch_model(
    name: str,
    settings: Settings,
    progress: Progress,
    revision: str | None = None,
    *,
    update: bool = False,
) -> LocalModel:
    """Resolve a name and bring the model here if it is not; see ``store.fetch``."""
    reference = resolve(name, catalog.load(), revision)
    wanted = replace(settings.fetch_settings(), update=update)
    return fetch(reference, Store(settings.store_root), wanted, progress)


def load(options: LoadOptions, settings: Settings, progress: Progress) -> LoadedModel:
    """Load a model ready to answer. Every refusal is an LlmrunError with its exit code."""
    clock = _Stopwatch()
    kv_form = _kv_form(options.kv)
    device = dispatch.choose_device(options.device)
    backend = dispatch.bind(device, options.threads or usable_processors())
    clock.lap("bind")
    local = fetch_model(options.model, settings, progress, options.revision)
    clock.lap("fetch")
    source = open_source(local.path)
    choice = choose_scheme(options.quant, source, _recommended(local), options.requantize)
    clock.lap("open")
    conversation = open_conversation(local.path, source, options.template)
    clock.lap("tokenizer")
    notes = list(conversation.notes)
    if choice.scheme is not None and choice.scheme.publishable and not choice.requantized:
        source, made = _converted(source, choice, local, settings, progress)
        choice = Choice(None, choice.name, choice.note)
        notes += made
        clock.lap("convert")
    planned = plan_weights(choice, source, resident=True)
    need = _need(choice, source, planned, kv_form)
    free = memory.free_bytes() if device == "cpu" else None
    spec = source.binding.spec
    context, shorter = memory.fit_context(need, options.ctx, spec.max_positions, free)
    coverage = CoverageBuilder(choice.scheme)
    decoder = build(spec, source.tensors(_counted(choice, source, planned, coverage)), backend)
    clock.lap("weights")
    return LoadedModel(
        local=local,
        scheme=choice.name,
        coverage=coverage.finish(allow_partial=options.allow_partial),
        spec=spec,
        decoder=decoder,
        backend=backend,
        tokenizer=conversation.tokenizer,
        template=conversation.template,
        stop_ids=conversation.stop_ids,
        sampling=conversation.sampling,
        context=context,
        kv_form=kv_form,
        times=LoadTimes(clock.parts_ms),
        notes=tuple(notes if shorter is None else [*notes, shorter]),
        decisions=(choice.note, *_device_note(options, backend)),
        stops=conversation.stops,
    )


@dataclass(frozen=True)
class QuantizeResult:
    """What ``quantize`` made: the folder, what it holds, and its size in bytes."""

    path: Path
    coverage: Coverage
    files_bytes: int


def plan_quantization(
    name: str,
    scheme: str,
    settings: Settings,
    progress: Progress,
    revision: str | None = None,
    *,
    requantize: bool = False,
) -> tuple[LocalModel, Conversion]:
    """Fetch a model and plan its conversion; no weight is read."""
    local = fetch_model(name, settings, progress, revision)
    source = open_source(local.path)
    choice = choose_scheme(scheme, source, _recommended(local), requantize)
    return local, prepare(source, choice, local, sidecars(local.path, source))


def quantize(
    local: LocalModel,
    conversion: Conversion,
    out: Path | None,
    settings: Settings,
    on_tensor: Callable[[str, int, int], None] | None = None,
    *,
    allow_partial: bool = False,
) -> QuantizeResult:
    """Write a planned conversion, atomically: to the new folder ``out``, or into the store.

    UsageError if ``out`` exists. ``on_tensor(name, bytes done, bytes in all)`` follows along.
    """
    coverage: list[Coverage] = []

    def write(folder: Path) -> None:
        coverage.append(conversion.write(folder, on_tensor, allow_partial=allow_partial)[1])

    if out is None:
        path = Store(settings.store_root).ensure(key_for(local, _recipe(conversion.choice)), write)
    else:
        path = export(out, write)
    if not coverage:
        coverage.append(_coverage_of(path))
    size = sum(file.stat().st_size for file in path.iterdir())
    return QuantizeResult(path, coverage[0], size)


def stored_coverage(source: Source) -> Coverage:
    """Bits and bytes of a model as stored. Reads each tensor once; nothing stays in memory."""
    kept = plan_weights(Choice(None, "none", ""), source, resident=False)
    coverage = CoverageBuilder(None)
    for name, form in source.tensors(lambda _, form: form):
        coverage.add(name, source.binding.parameters[name].role, form, kept[name])
    return coverage.finish()


def _coverage_of(path: Path) -> Coverage:
    return stored_coverage(open_source(path))


def _converted(
    source: Source,
    choice: Choice,
    local: LocalModel,
    settings: Settings,
    progress: Progress,
) -> tuple[Source, list[str]]:
    # The quantized copy in the store, made now if it is not there: quantizing takes longer than
    # loading, and the result is the same bytes every time.
    conversion = prepare(source, choice, local, sidecars(local.path, source))
    notes = []

    def write(folder: Path) -> None:
        total = conversion.layout.nbytes
        progress.start(f"quantizing to {choice.name}", total)
        done = 0

        def advance(_: str, reached: int, __: int) -> None:
            nonlocal done
            progress.advance(reached - done)
            done = reached

        try:
            conversion.write(folder, advance)
        finally:
            progress.finish()
        notes.append(
            f"made a copy in {choice.name}, {total / 1e6:,.0f} MB, in the store; "
            "later runs load it as it is"
        )

    path = Store(settings.store_root).ensure(key_for(local, _recipe(choice)), write)
    return open_source(path), notes


def _recipe(choice: Choice) -> str:
    requantized = " requantized" if choice.requantized else ""
    return f"{choice.name}{requantized} v{CONVERSION_VERSION}"


def _counted(
    choice: Choice, source: Source, planned: Mapping[str, Planned], coverage: CoverageBuilder
) -> Callable[[str, Form], Form]:
    parameters = source.binding.parameters

    def brought(name: str, form: Form) -> Form:
        role = parameters[name].role
        result = change(choice, role, planned[name], name, form)
        coverage.add(name, role, result, planned[name])
        return result

    return brought


def _need(
    choice: Choice, source: Source, planned: Mapping[str, Planned], kv_form: str
) -> memory.Need:
    stored = source.stored_bytes()
    total = 0.0
    for name, (_, shape, kind) in weights_to_plan(choice, source).items():
        scheme = planned[name].scheme
        if scheme is None:
            total += stored[name]
        else:
            n, k = shape
            total += n * k * find(scheme).bits_per_weight((n, k), DType[kind.upper()]) / 8
    spec = source.binding.spec
    element = 2 * spec.heads.n_kv_heads * spec.heads.head_dim * ELEMENT_BYTES[kv_form]
    return memory.Need(int(total), element * len(spec.layers))


def _kv_form(wanted: str) -> str:
    if wanted == "auto":
        return "f16"
    if wanted in ELEMENT_BYTES:
        return wanted
    raise UnavailableError(
        f"--kv {wanted} is not available", f"use --kv auto or one of: {', '.join(ELEMENT_BYTES)}"
    )


def _recommended(local: LocalModel) -> str | None:
    entry = catalog.load().entries.get(local.alias) if local.alias else None
    return entry.quant if entry else None


def _device_note(options: LoadOptions, backend: Backend) -> tuple[str, ...]:
    if options.device != "auto":
        return ()
    return (f"device {backend.device} ({backend.name} kernels, {backend.threads} threads)",)


class _Stopwatch:
    """Milliseconds between laps, by name."""

    def __init__(self) -> None:
        self.parts_ms: dict[str, float] = {}
        self._last = time.monotonic_ns()

    def lap(self, part: str) -> None:
        now = time.monotonic_ns()
        self.parts_ms[part] = (now - self._last) / 1e6
        self._last = now
