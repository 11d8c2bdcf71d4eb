"""The models of an evaluation, opened but not loaded: the reference, and each child as chat has it.

A child in a scheme that files can hold is the copy in the store, made now if it is not there; one
in another scheme is made tensor by tensor as its layers are read.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.cli.apart import Stopped
from llmrun.cli.choice import Choice, CopyOptions, change, choose_scheme, plan_weights
from llmrun.cli.copies import is_kept_in_store, made_while_loading, refuse_unused
from llmrun.cli.eval_lockstep import Side
from llmrun.cli.fetching import fetch_model, recommended_scheme
from llmrun.cli.loading import title
from llmrun.cli.quantizing import Order, quantized_copy
from llmrun.cli.settings import Settings
from llmrun.cli.source import Source, open_source
from llmrun.errors import UsageError
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import Backend
from llmrun.model.spec import DecoderSpec
from llmrun.quant.audit import Coverage, CoverageBuilder
from llmrun.quant.recipe import Planned
from llmrun.quant.scheme import Scheme
from llmrun.store.model import LocalModel
from llmrun.store.progress import Progress

if TYPE_CHECKING:
    from llmrun.text.tokenizer import Tokenizer

SPELLED_OTHERWISE = 0.01
"""Part of a vocabulary that may be spelled otherwise, among ids that no text here uses."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A model's files and their headers."""

    local: LocalModel
    source: Source

    @property
    def name(self) -> str:
        """What it is called."""
        return self.local.alias or self.local.name

    @property
    def title(self) -> str:
        """What it is called where there is little room."""
        return title(self.local)

    @property
    def stored(self) -> str:
        """How its weights are stored, in a word or two."""
        return self.source.checkpoint.quantization or "not quantized"

    @property
    def spec(self) -> DecoderSpec:
        """The decoder it is."""
        return self.source.binding.spec

    def tokenizer(self) -> "Tokenizer":
        """Its tokenizer. ModelFileError if that is damaged."""
        from llmrun.text.tokenizer import Tokenizer

        if self.source.checkpoint.layout == "gguf":
            return Tokenizer.from_gguf(self.source.checkpoint.config)
        return Tokenizer.from_folder(self.local.path)


@dataclass(frozen=True, eq=False)
class Child:
    """A model in the scheme it is judged in. ``asked``: what its bits are audited against.

    ``file_bytes``: of what is loaded; None if the scheme is made while loading.
    """

    opened: Opened
    choice: Choice
    asked: Scheme | None
    source: Source
    file_bytes: int | None
    notes: tuple[str, ...] = ()

    @property
    def scheme(self) -> str:
        """The scheme's name, or how the file is quantized."""
        return self.choice.name


@dataclass(frozen=True)
class MakeOptions:
    """How children are made. ``make_backend``: what a calibration text is read on."""

    make_backend: Callable[[], Backend]
    copying: CopyOptions = CopyOptions()  # noqa: RUF009 - frozen
    requantize: bool = False


def open_model(
    name: str, settings: Settings, progress: Progress, revision: str | None = None
) -> Opened:
    """Fetch a model and read its headers, with no scale rounded to 16 bits later."""
    local = fetch_model(name, settings, progress, revision)
    return Opened(local, open_source(local.path, exact=True))


def make_child(
    opened: Opened,
    scheme: str,
    options: MakeOptions,
    settings: Settings,
    progress: Progress,
    stopped: Stopped,
) -> Child:
    """A model in a scheme, as chat would load it with ``-q``. Refusals are those of loading."""
    local = opened.local
    source = open_source(local.path, exact=scheme == "none")
    isa = options.make_backend().isa if scheme == "auto" else None  # which auto goes by
    choice = choose_scheme(scheme, source, recommended_scheme(local), options.requantize, isa)
    size = sum(record.size for record in local.files)
    if choice.scheme is None:
        return Child(opened, choice, None, source, size)
    if not is_kept_in_store(choice, source):
        refuse_unused(options.copying, made_while_loading(source))
        return Child(opened, choice, choice.scheme, source, None)
    asked = Order(local, source, choice, options.copying, options.make_backend)
    copy, notes = quantized_copy(asked, settings, progress, stopped)
    size = sum(record.nbytes for record in copy.checkpoint.tensors.values())
    kept = Choice(None, choice.name, choice.note)
    return Child(opened, kept, choice.scheme, copy, size, tuple(notes))


def check_comparable(reference: Opened, child: Opened) -> None:
    """UsageError unless both are decoders of the same build."""
    ours, theirs = child.spec, reference.spec
    shapes = [(len(s.layers), s.hidden, s.heads) for s in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"{child.name} and {reference.name} cannot be compared: "
            f"{_build(ours)} against {_build(theirs)}.",
            "Give --against the model it was made from.",
        )


def check_same_vocabulary(reference: Opened, child: Opened, used: Collection[int]) -> None:
    """UsageError unless ids mean the same tokens in both: those ``used`` all, nearly all others.

    Files of one model may spell a few specials differently; ids that one of them has no token for
    (padding) are not compared.
    """
    one, other = reference.tokenizer(), child.tokenizer()
    differing = {
        i: (ours, theirs)
        for i in range(min(one.n_ids, other.n_ids))
        if (ours := one.token_text(i)) != (theirs := other.token_text(i)) and ours and theirs
    }
    wrong = sorted(i for i in used if i in differing)
    if not wrong and len(differing) <= SPELLED_OTHERWISE * one.n_ids:
        return
    token_id = wrong[0] if wrong else min(differing)
    ours, theirs = differing[token_id]
    raise UsageError(
        f"{child.name} and {reference.name} cannot be compared: they have different vocabularies "
        f"(id {token_id} is {theirs!r} here and {ours!r} there).",
        "Give --against the model it was made from.",
    )


class Counted:
    """Reads a child's parameters in their forms, and counts what it reads once."""

    def __init__(self, child: Child, backend: Backend, allow_partial: bool) -> None:
        self._child = child
        self._backend = backend
        self._allow_partial = allow_partial
        self._planned = plan_weights(child.choice, child.source, resident=True)
        self._builder = CoverageBuilder(child.asked)
        self._seen: set[str] = set()

    def side(self) -> Side:
        """The child, to be pushed through."""
        source = self._child.source
        return Side(
            self._child.scheme,
            source.binding.spec,
            self._backend,
            lambda number: source.layer(number, self._brought),
            lambda: source.outer(self._brought),
        )

    def coverage(self) -> Coverage:
        """After everything was read: what it takes. UnavailableError if over what was asked."""
        return self._builder.finish(allow_partial=self._allow_partial)

    def _brought(self, name: str, form: Form) -> Form:
        role = self._child.source.binding.parameters[name].role
        planned: Planned = self._planned[name]
        result = change(self._child.choice, role, planned, name, form)
        if name not in self._seen:
            self._seen.add(name)
            self._builder.add(name, role, result, planned, self._backend.widening(result.kind))
        return result


def reference_side(opened: Opened, backend: Backend) -> Side:
    """The reference, as stored."""
    source = opened.source
    layer: Callable[[int], dict[str, Form]] = source.layer
    return Side("reference", opened.spec, backend, layer, source.outer)


def _build(spec: DecoderSpec) -> str:
    heads = spec.heads
    return (
        f"{len(spec.layers)} layers of {spec.hidden} with {heads.n_heads} / {heads.n_kv_heads} "
        f"heads of {heads.head_dim}"
    )
