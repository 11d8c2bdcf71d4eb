"""``llmrun eval`` without its words: names in, records out.

Free of typer and rich, as ``assemble`` is. One straight line: open the reference and the child,
quantize on the way, cut the text, push all through their layers in lockstep, write it down.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.cli.apart import Stopped, apart, check
from llmrun.cli.choice import CopyOptions
from llmrun.cli.copies import STAYS, refuse_unused
from llmrun.cli.eval_lockstep import KV_FORM, OnWork, run
from llmrun.cli.eval_models import (
    Child,
    Counted,
    MakeOptions,
    Opened,
    check_comparable,
    check_same_vocabulary,
    make_child,
    open_model,
    reference_side,
)
from llmrun.cli.eval_record import EvalRecord, Json, Scored, Setup, Subject, Weighed
from llmrun.cli.eval_text import Cut, EvalText, Extent, cut, read_text
from llmrun.cli.receipt import shortened, versions
from llmrun.cli.settings import Settings
from llmrun.cli.threads import ThreadChoice, choose_threads
from llmrun.errors import InternalError, UsageError
from llmrun.kernels import dispatch
from llmrun.kernels.ops import Backend, CpuOptions
from llmrun.measure.environment import environment, peak_host_bytes
from llmrun.quant.audit import Coverage
from llmrun.store.model import FileRecord, LocalModel
from llmrun.store.progress import Progress


@dataclass(frozen=True)
class EvalOptions:
    """What the user asked for. ``schemes`` empty: the model as it is stored.

    ``against``: another model that is the reference; None: the model itself, as it is stored.
    ``by_layer``: measure KL by layer too.
    """

    model: str
    schemes: tuple[str, ...] = ()
    against: str | None = None
    revision: str | None = None
    text: Path | None = None
    extent: Extent = Extent()  # noqa: RUF009 - frozen
    copying: CopyOptions = CopyOptions()  # noqa: RUF009 - frozen
    requantize: bool = False
    device: str = "auto"
    threads: int | None = None
    cpu_isa: str | None = None
    by_layer: bool = False


@dataclass(frozen=True)
class Evaluation:
    """One record for each scheme, in the order they were asked for. ``notes`` are worth a line."""

    records: tuple[EvalRecord, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that is known before anything is compared."""

    reference: Opened
    children: tuple[Child, ...]
    text: EvalText
    cut: Cut
    notes: tuple[str, ...]


def prepare(options: EvalOptions, settings: Settings, progress: Progress) -> Prepared:
    """Open and, where asked, quantize; cut the text.

    UsageError for models that cannot be compared, or when there is nothing to compare.
    """
    dispatch.check(dispatch.choose_device(options.device))  # before hours of quantizing
    text = read_text(options.text)
    opened = open_model(options.model, settings, progress, options.revision)
    reference = opened
    if options.against is not None:
        reference = open_model(options.against, settings, progress)
        check_comparable(reference, opened)
    schemes = _schemes(options, opened)
    _check_context(options.extent.context, reference)
    vocab = min(reference.spec.vocab, opened.spec.vocab)
    windows = cut(text, options.extent, reference.tokenizer(), vocab)
    if options.against is not None:
        used = {token_id for ids in windows.windows.sequences for token_id in ids}
        check_same_vocabulary(reference, opened, used)

    def made(stopped: Stopped) -> tuple[Child, ...]:
        return tuple(
            make_child(opened, scheme, make, settings, progress, stopped) for scheme in schemes
        )

    threads = choose_threads(options.threads)
    make = MakeOptions(
        lambda: _bind(threads, options, exact=False), options.copying, options.requantize
    )
    children = apart(made)
    if all(child.asked is None for child in children):
        refuse_unused(options.copying, STAYS)
    if options.against is None:
        _check_children(children)
    notes = [note for child in children for note in child.notes]
    if options.against is not None:
        notes += _another_parent(opened, reference)
    if len(windows.windows.sequences) < options.extent.windows:
        notes.append(
            f"the text has {windows.text_tokens:,} tokens: {len(windows.windows.sequences)} "
            f"windows of {options.extent.context} instead of {options.extent.windows}"
        )
    return Prepared(reference, children, text, windows, tuple(notes))


def evaluate(options: EvalOptions, prepared: Prepared, on_work: OnWork) -> Evaluation:
    """Compare. UnavailableError as loading, if a child takes more bits than its scheme promises."""
    start_s = time.monotonic()
    threads = choose_threads(options.threads)
    exact = _bind(threads, options, exact=True)
    plain = _bind(threads, options, exact=False)
    counted = [
        Counted(
            child,
            exact if child.asked is None and child.choice.untouched else plain,
            options.copying.allow_partial,
        )
        for child in prepared.children
    ]
    reference = reference_side(prepared.reference, exact)
    sides = [each.side() for each in counted]

    def work(stopped: Stopped) -> list[EvalRecord]:
        def heeding(done: int, total: int) -> None:
            check(stopped)
            on_work(done, total)

        windows, by_layer = prepared.cut.windows, options.by_layer
        floor, measured = run(reference, sides, windows, heeding, by_layer=by_layer)
        coverages = [each.coverage() for each in counted]
        setup = _setup(exact, threads, time.monotonic() - start_s)
        return [
            EvalRecord(
                _subject(child, prepared.reference, options.copying),
                _weighed(child, coverage),
                one,
                floor,
                _scored(prepared),
                setup,
            )
            for child, coverage, one in zip(prepared.children, coverages, measured, strict=True)
        ]

    return Evaluation(tuple(apart(work)), (*prepared.notes, *threads.notes))


def refuse_nonfinite(records: Sequence[EvalRecord]) -> None:
    """InternalError if a position had logits that are not finite: the figures leave it out."""
    for record in records:
        if not record.nonfinite:
            continue
        all_positions = record.nonfinite + record.fidelity.tokens
        of = record.subject.reference if record.floor.nonfinite else record.subject.scheme
        raise InternalError(
            f"{record.nonfinite:,} of {all_positions:,} positions have logits that are not finite "
            f"({of}); the figures leave them out.",
            "Do not use this model in this form; try another scheme (-q int8), "
            "or report it with the model's name.",
        )


def _schemes(options: EvalOptions, opened: Opened) -> tuple[str, ...]:
    """The schemes to judge; for a model that is to be judged as it is, how it is loaded."""
    if options.schemes:
        return options.schemes
    if options.against is not None:
        return ("auto",) if opened.source.is_quantized else ("none",)
    name = options.model
    if not opened.source.is_quantized:
        raise UsageError(
            f"{opened.name} is not quantized, and no scheme is named: there is nothing to compare.",
            f"Name one or several: llmrun eval {name} -q int4,int8",
        )
    parent = _parent(opened) or ""
    typed = parent if "/" in parent else "MODEL"  # of a folder of somebody's only the name is kept
    called = f" ({parent})" if parent else ""
    raise UsageError(
        f"{opened.name} is quantized already ({opened.stored}); what it is to be compared with is "
        "not named.",
        f"Name the model it was made from{called}: llmrun eval {name} --against {typed}",
    )


def _parent(opened: Opened) -> str | None:
    """What a folder that llmrun wrote was made from, as its record says."""
    model = _recorded_source(opened).get("model")
    return model if isinstance(model, str) else None


def _another_parent(opened: Opened, reference: Opened) -> list[str]:
    """A note if the record of a model names other weights than those it is compared with."""
    files = _recorded_source(opened).get("files")
    if not isinstance(files, dict):
        return []
    given = {record.path: record for record in reference.local.files}
    weights = [name for name in files if name.endswith((".safetensors", ".gguf"))]
    if all(name in given and _same(files[name], given[name]) for name in weights):
        return []
    return [
        f"{opened.name} was made from {_parent(opened)}, as its llmrun.json says, whose weights "
        f"are not those of {reference.name}: the figures compare two different models"
    ]


def _same(said: object, file: FileRecord) -> bool:
    """Whether a recorded file is that file, as far as both are known: hashes are not always."""
    if not isinstance(said, dict) or said.get("bytes") != file.size:
        return False
    return file.sha256 is None or said.get("sha256") in (None, file.sha256)


def _recorded_source(opened: Opened) -> dict[str, object]:
    """The part of llmrun.json that says what a folder was made from; empty without one."""
    import json

    try:
        said = json.loads((opened.local.path / "llmrun.json").read_text(encoding="utf-8"))
        source = said["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return source if isinstance(source, dict) else {}


def _check_children(children: Sequence[Child]) -> None:
    for child in children:
        if child.asked is None and not child.choice.untouched:
            raise UsageError(
                f"{child.opened.name} is stored in {child.scheme} already "
                f"({child.opened.stored}): it would be compared with itself.",
                "Name the model it was made from with --against, or another scheme "
                "with --requantize.",
            )


def _check_context(context: int, reference: Opened) -> None:
    most = reference.spec.max_positions
    if context > most:
        raise UsageError(
            f"--context {context:,} is longer than the {most:,} tokens {reference.name} was "
            "trained for.",
            f"Give --context {most} or less.",
        )


def _bind(threads: ThreadChoice, options: EvalOptions, *, exact: bool) -> Backend:
    device = dispatch.choose_device(options.device)
    cpu = CpuOptions(threads.decode, options.cpu_isa, True, exact)
    return dispatch.bind(device, threads.prefill, cpu)


def _setup(backend: Backend, threads: ThreadChoice, seconds: float) -> Setup:
    return Setup(
        device=backend.device,
        kernels=backend.name,
        isa=backend.isa,
        threads=threads.prefill,
        kv=KV_FORM,
        seconds=seconds,
        peak_host_bytes=peak_host_bytes(),
        peak_device_bytes=None,
        env=environment(versions()),
    )


def _scored(prepared: Prepared) -> Scored:
    made = prepared.cut
    return Scored(
        text=prepared.text.name,
        text_sha256=prepared.text.sha256,
        token_ids_sha256=made.ids_sha256,
        context=len(made.windows.sequences[0]),
        windows=len(made.windows.sequences),
        tokens_read=made.tokens_read,
        bos=made.bos is not None,
    )


def _weighed(child: Child, coverage: Coverage) -> Weighed:
    total = coverage.total
    return Weighed(total.bits_per_weight, coverage.actual_bits, total.nbytes, child.file_bytes)


def _subject(child: Child, reference: Opened, copying: CopyOptions) -> Subject:
    own, theirs = child.opened.local, reference.local
    made = child.asked is not None
    return Subject(
        model=shortened(own.alias or own.name),
        revision=own.revision,
        scheme=child.scheme,
        reference=shortened(theirs.alias or theirs.name),
        reference_revision=theirs.revision,
        reference_stored=reference.stored,
        files=_files(own),
        reference_files=_files(theirs),
        calibrate=copying.calibrate if made else None,
        target_bpw=copying.target_bpw if made else None,
    )


def _files(local: LocalModel) -> tuple[Json, ...]:
    return tuple(
        {"path": file.path, "size": file.size, "sha256": file.sha256} for file in local.files
    )
