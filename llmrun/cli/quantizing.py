"""Quantized checkpoints made from models: for the user with ``llmrun quantize``, and in the store.

The copy in the store is what later loads use: quantizing takes longer than loading, and the result
is the same bytes every time.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.cli.apart import Stopped, check
from llmrun.cli.calibration import (
    AUTOMATIC_SECONDS,
    NO_TEXT,
    WORDS,
    Calibration,
    calibrating_seconds,
    choose_calibration,
)
from llmrun.cli.choice import Choice, CopyOptions, choose_scheme
from llmrun.cli.conversation import open_conversation
from llmrun.cli.conversion import Conversion, Recipe, prepare
from llmrun.cli.fetching import fetch_model, recommended_scheme
from llmrun.cli.settings import Settings
from llmrun.cli.source import Source, open_source
from llmrun.cli.tensor_progress import tensor_progress
from llmrun.cli.threads import choose_threads
from llmrun.errors import UsageError
from llmrun.kernels import dispatch
from llmrun.kernels.ops import Backend, never
from llmrun.quant.audit import Coverage
from llmrun.quant.mixing import WIDE_SCHEME
from llmrun.store.derived import key_for
from llmrun.store.export import export
from llmrun.store.model import LocalModel
from llmrun.store.progress import Progress
from llmrun.store.store import Store
from llmrun.store.waiting import Waiting

VERSION = "2"
"""Part of the key of quantized copies in the store: counts up when their bytes change."""

OnTensor = Callable[[str, int, int], None]


def on_best_device() -> Backend:
    """What a calibration text is read on, if nobody says otherwise."""
    return dispatch.bind(dispatch.choose_device("auto"), choose_threads().prefill)


@dataclass(frozen=True)
class QuantizeResult:
    """What ``quantize`` made: the folder, what it holds, and its size in bytes. ``notes`` are
    worth a line."""

    path: Path
    coverage: Coverage
    files_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Order:
    """What is to be made of which model.

    ``make_backend``: what a calibration text is read on. ``notes``: what was decided, in sentences.
    """

    local: LocalModel
    source: Source
    choice: Choice
    options: CopyOptions = CopyOptions()  # noqa: RUF009 - frozen
    make_backend: Callable[[], Backend] = on_best_device
    notes: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        """What names the copy among others of the same model."""
        return recipe(self.choice, self.options)

    @property
    def weighs(self) -> bool:
        """Whether ``auto`` is to read a text: 8 bits are so close to the model that they gain
        next to nothing by one."""
        scheme = self.choice.scheme
        assert scheme is not None
        return scheme.weighted and scheme.family != WIDE_SCHEME

    def calibrated(self, calibrate: str) -> "Order":
        """The same with another calibration."""
        return replace(self, options=replace(self.options, calibrate=calibrate))


def order(
    name: str,
    scheme: str,
    settings: Settings,
    progress: Progress,
    options: CopyOptions,
    revision: str | None = None,
    *,
    requantize: bool = False,
) -> Order:
    """Fetch a model and settle what is to be done; no weight is read.

    UsageError if there is nothing to do; UnavailableError for an unknown scheme.
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
    return settled(Order(local, source, choice, options), Store(settings.store_root))


def settled(asked: Order, store: Store) -> Order:
    """Decide what ``--calibrate auto`` means here, so that copies are named by what was read.

    A copy in the store that was calibrated on the bundled text is taken as it is; else the text is
    read if that is quick.
    """
    if asked.options.calibrate != "auto":
        return asked
    if not asked.weighs:
        return asked.calibrated("none")
    bundled = asked.calibrated("bundled")
    if store.has(key_for(asked.local, bundled.recipe)):
        return bundled
    seconds = calibrating_seconds(asked.source, asked.make_backend)
    if seconds <= AUTOMATIC_SECONDS:
        return bundled
    why = f"reading one would take about {seconds / 60:.0f} minutes here"
    note = f"no calibration text: {why} (--calibrate bundled does it)"
    return replace(asked.calibrated("none"), notes=(*asked.notes, note))


def kept(asked: Order, settings: Settings) -> Path | None:
    """The copy of a settled order in the store, if it is there."""
    store, key = Store(settings.store_root), key_for(asked.local, asked.recipe)
    return store.folder(key) if store.has(key) else None


def plan(asked: Order, on_work: OnTensor) -> tuple[Conversion, tuple[str, ...]]:
    """Plan a settled order; also returns what was decided, in sentences.

    The units of a mixed recipe are found by trying them, which takes time: ``on_work(what, done,
    in all)`` is told, and may raise. UnavailableError for a model that cannot be written, or only
    in more bits than the scheme promises (unless that is allowed).
    """
    choice, options = asked.choice, asked.options
    assert choice.scheme is not None
    if options.target_bpw is not None and choice.scheme.name == WIDE_SCHEME:
        raise UsageError(
            f"{WIDE_SCHEME} gives all weights 8 bits, so --target-bpw has nothing to choose",
            "leave it out, or choose int4 or nl4",
        )
    # What cannot be written is refused before a text is read.
    first = prepare(asked.source, choice, asked.local, Recipe(), asked.make_backend)
    if options.target_bpw is None:
        first.refuse_excess(allow_partial=options.allow_partial)
    calibration, notes = _calibration(asked)
    notes = (*asked.notes, *notes)
    decided = Recipe(calibration)
    if options.target_bpw is not None:
        from llmrun.cli.upgrades import find_widened

        widened, note = find_widened(
            asked.source, choice, options.target_bpw, calibration, asked.make_backend, on_work
        )
        decided = Recipe(calibration, widened)
        notes = (*notes, note)
    conversion = prepare(asked.source, choice, asked.local, decided, asked.make_backend)
    conversion.refuse_excess(allow_partial=options.allow_partial)
    return conversion, notes


def _calibration(asked: Order) -> tuple[Calibration | None, tuple[str, ...]]:
    scheme, wanted = asked.choice.scheme, asked.options.calibrate
    assert scheme is not None
    if wanted == "none":
        return None, (NO_TEXT,) if asked.weighs and not asked.notes else ()
    alone = wanted == "random" and scheme.family == WIDE_SCHEME  # they do not weigh, but compensate
    if not scheme.weighted or alone:
        raise UsageError(
            f"{scheme.name} would be the same with --calibrate {wanted} as without",
            "leave --calibrate out, or choose int4 or nl4",
        )
    if wanted == "random":
        decision = choose_calibration(wanted, asked.source, None, asked.make_backend)
        return decision.calibration, (decision.note,)
    conversation = open_conversation(asked.local.path, asked.source, None)
    try:
        decision = choose_calibration(wanted, asked.source, conversation, asked.make_backend)
    finally:
        conversation.template.close()
    return decision.calibration, (decision.note,)


def quantize(
    asked: Order,
    conversion: Conversion,
    out: Path | None,
    settings: Settings,
    on_tensor: OnTensor | None = None,
    stopped: Stopped = never,
) -> QuantizeResult:
    """Write a planned conversion, atomically: to the new folder ``out``, or into the store.

    UsageError if ``out`` exists; UnavailableError if the result takes over 10 % more bits than
    the scheme promises, unless that is allowed. ``on_tensor(name, bytes done, bytes in all)``.
    """
    made: list[tuple[Coverage, list[str]]] = []

    def write(folder: Path) -> dict[str, str]:
        notes: list[str] = []
        report, coverage = conversion.write(
            folder,
            on_tensor,
            lambda: check(stopped),
            notes.append,
            allow_partial=asked.options.allow_partial,
        )
        made.append((coverage, notes))
        return dict(report.sha256)

    if out is None:
        path = Store(settings.store_root).ensure(key_for(asked.local, asked.recipe), write)
    else:
        # A user's folder that nobody hashed is told apart by times, which the plan leaves out.
        job = f"{key_for(asked.local, asked.recipe).folder} {conversion.content.plan}"
        path = export(out, write, job)
    coverage, notes = made[0] if made else (stored_coverage(path, conversion), [])
    size = sum(file.stat().st_size for file in path.iterdir())
    return QuantizeResult(path, coverage, size, tuple(notes))


def convert(
    name: str,
    scheme: str,
    out: Path,
    settings: Settings,
    progress: Progress,
    options: CopyOptions = CopyOptions(),  # noqa: B008 - frozen
    *,
    requantize: bool = False,
) -> QuantizeResult:
    """All of it at once, for who has nothing to say in between: a new folder ``out``."""
    asked = order(name, scheme, settings, progress, options, requantize=requantize)
    conversion, _ = plan(asked, lambda name, done, total: None)
    return quantize(asked, conversion, out, settings)


def stored_coverage(path: Path, conversion: Conversion) -> Coverage:
    """Bits and bytes of a copy that is there already, audited anew."""
    written = open_source(path)
    return conversion.audited(written.published_tensors(lambda _, form: form), allow_partial=True)


def quantized_copy(
    asked: Order, settings: Settings, progress: Progress, stopped: Stopped
) -> tuple[Source, list[str]]:
    """The copy of a model in a scheme from the store, made now if it is not there.

    Returns it opened, with what is worth saying. UnavailableError as ``quantize``.
    """
    store = Store(settings.store_root)
    asked = settled(asked, store)
    notes: list[str] = []
    name = asked.choice.name
    expected = prepare(asked.source, asked.choice, asked.local, Recipe(), asked.make_backend)
    waiting = Waiting(progress, expected.content.layout.nbytes)

    def write(folder: Path) -> dict[str, str]:
        waiting.end()
        finding = f"finding what needs 8 bits beside {name}"
        with tensor_progress(progress, finding, "layers") as on_work:
            conversion, said = plan(asked, heeding(stopped, on_work))
        notes.extend(said)
        with tensor_progress(progress, f"quantizing to {name}") as on_tensor:
            report, _ = conversion.write(
                folder,
                on_tensor,
                lambda: check(stopped),
                notes.append,
                allow_partial=asked.options.allow_partial,
            )
        notes.append(
            f"made a copy in {name}, {conversion.content.layout.nbytes / 1e6:,.0f} MB, in the "
            "store; later runs load it as it is"
        )
        return dict(report.sha256)

    key = key_for(asked.local, asked.recipe)
    try:
        path = store.ensure(key, write, on_wait=waiting.look)
    finally:
        waiting.end()
    return open_source(path), notes


def heeding(stopped: Stopped, on_tensor: OnTensor) -> OnTensor:
    """A progress callback that also leaves the work when Ctrl-C was pressed."""

    def told(name: str, reached: int, total: int) -> None:
        check(stopped)
        on_tensor(name, reached, total)

    return told


def recipe(choice: Choice, options: CopyOptions) -> str:
    """What names a quantized copy among others of the same model, once its calibration is settled.

    A calibration text counts by its name and content: a file that changes makes another copy.
    """
    words = [choice.name]
    if choice.requantized:
        words.append("requantized")
    if options.target_bpw is not None:
        words.append(f"at {options.target_bpw:g} bits")
    if options.calibrate != "none":
        words.append(f"calibrated on {named_text(options.calibrate)}")
    return " ".join((*words, f"v{VERSION}"))


def named_text(calibrate: str) -> str:
    """``--calibrate`` as a name of what is read: for a file the hash of its content."""
    if calibrate in WORDS:
        return calibrate
    try:
        return hashlib.sha256(Path(calibrate).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UsageError(
            f"the calibration text {calibrate} cannot be read: {error.strerror or error}",
            f"give --calibrate a UTF-8 text file, or one of: {', '.join(WORDS)}",
        ) from error
