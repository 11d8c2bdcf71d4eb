"""Quantized checkpoints made from models: for the user with ``llmrun quantize``, and in the store.

The copy in the store is what later loads use: quantizing takes longer than loading, and the result
is the same bytes every time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.cli.apart import Stopped, check
from llmrun.cli.choice import Choice, choose_scheme
from llmrun.cli.conversion import Conversion, prepare, sidecars
from llmrun.cli.fetching import fetch_model, recommended_scheme
from llmrun.cli.settings import Settings
from llmrun.cli.source import Source, open_source
from llmrun.cli.tensor_progress import tensor_progress
from llmrun.errors import UsageError
from llmrun.quant.audit import Coverage, CoverageBuilder
from llmrun.quant.recipe import Planned
from llmrun.quant.scheme import Scheme
from llmrun.store.derived import key_for
from llmrun.store.export import export
from llmrun.store.model import LocalModel
from llmrun.store.progress import Progress
from llmrun.store.store import Store
from llmrun.store.waiting import Waiting

VERSION = "1"
"""Part of the key of quantized copies in the store: counts up when their bytes change."""


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
    """Fetch a model and plan its conversion; no weight is read.

    UsageError if there is nothing to do; UnavailableError for a scheme that cannot be written.
    """
    if scheme in ("auto", "none"):
        raise UsageError(f"-q {scheme} names no scheme", "give -q int4, int8 or another scheme")
    local = fetch_model(name, settings, progress, revision)
    source = open_source(local.path)
    choice = choose_scheme(scheme, source, recommended_scheme(local), requantize)
    if choice.scheme is None:
        raise UsageError(
            f"{name} is stored in {scheme} already ({source.checkpoint.quantization})",
            f"run it as it is: llmrun chat {name}",
        )
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

    UsageError if ``out`` exists; UnavailableError if the result takes over 10 % more bits than
    the scheme promises, unless ``allow_partial``. ``on_tensor(name, bytes done, bytes in all)``.
    """

    def write(folder: Path) -> None:
        conversion.write(folder, on_tensor, allow_partial=allow_partial)

    if out is None:
        key = key_for(local, recipe(conversion.choice))
        path = Store(settings.store_root).ensure(key, write)
    else:
        path = export(out, write)
    written = open_source(path)
    coverage = stored_coverage(written, conversion.choice.scheme, conversion.planned, allow_partial)
    return QuantizeResult(path, coverage, sum(file.stat().st_size for file in path.iterdir()))


def stored_coverage(
    source: Source, scheme: Scheme | None, planned: Mapping[str, Planned], allow_partial: bool
) -> Coverage:
    """Bits and bytes of a model as written by a plan, audited against its scheme.

    Reads each tensor once; nothing stays in memory.
    """
    coverage = CoverageBuilder(scheme)
    weights = source.published_weights()
    for name, form in source.published_tensors(lambda _, form: form):
        coverage.add(name, weights[name][0], form, planned[name])
    return coverage.finish(allow_partial=allow_partial)


def quantized_copy(
    source: Source,
    choice: Choice,
    local: LocalModel,
    settings: Settings,
    progress: Progress,
    allow_partial: bool,
    stopped: Stopped,
) -> tuple[Source, list[str]]:
    """The copy of a model in a scheme from the store, made now if it is not there.

    Returns it opened, with what is worth saying. UnavailableError as ``quantize``.
    """
    conversion = prepare(source, choice, local, sidecars(local.path, source))
    notes: list[str] = []
    waiting = Waiting(progress, conversion.layout.nbytes)

    def write(folder: Path) -> None:
        waiting.end()
        with tensor_progress(progress, f"quantizing to {choice.name}") as on_tensor:
            conversion.write(folder, heeding(stopped, on_tensor), allow_partial=allow_partial)
        notes.append(
            f"made a copy in {choice.name}, {conversion.layout.nbytes / 1e6:,.0f} MB, in the "
            "store; later runs load it as it is"
        )

    key = key_for(local, recipe(choice))
    try:
        path = Store(settings.store_root).ensure(key, write, on_wait=waiting.look)
    finally:
        waiting.end()
    return open_source(path), notes


OnTensor = Callable[[str, int, int], None]


def heeding(stopped: Stopped, on_tensor: OnTensor) -> OnTensor:
    """A progress callback that also leaves the work when Ctrl-C was pressed."""

    def told(name: str, reached: int, total: int) -> None:
        check(stopped)
        on_tensor(name, reached, total)

    return told


def recipe(choice: Choice) -> str:
    """What names a quantized copy among others of the same model."""
    requantized = " requantized" if choice.requantized else ""
    return f"{choice.name}{requantized} v{VERSION}"
