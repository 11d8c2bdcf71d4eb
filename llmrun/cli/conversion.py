"""Writing a quantized checkpoint: the plan, the files beside the weights, the stream of tensors.

Used by ``llmrun quantize`` and, for models that are not quantized yet, by loading (the result is
kept in the store). Tensors are written layer by layer; with a calibration text the model is run on
it beside that, and each layer is quantized by what its linears saw.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmrun import __version__
from llmrun.cli.calibration import Calibration
from llmrun.cli.calibrator import LayerCalibrator
from llmrun.cli.choice import Choice, change, plan_weights, weights_to_plan
from llmrun.cli.source import Source, is_dense
from llmrun.errors import InternalError, UnavailableError
from llmrun.formats.layout import plan_layout
from llmrun.formats.planned import Planned as PlannedTensor
from llmrun.formats.provenance import CARD_NAME, Provenance, license_of, model_card
from llmrun.formats.write import Content, Item, Progress, WrittenReport, write_folder
from llmrun.kernels.forms import Form
from llmrun.kernels.host import DType
from llmrun.kernels.ops import Backend
from llmrun.model.streaming import nothing
from llmrun.quant import compensation
from llmrun.quant.audit import Coverage, CoverageBuilder
from llmrun.quant.bnb_blocks import TABLES
from llmrun.quant.bnb_int8 import NAME as BNB_INT8
from llmrun.quant.compensation import Prepared
from llmrun.quant.deviation import relative_mse
from llmrun.quant.inputs import Inputs
from llmrun.quant.mixing import Unit
from llmrun.quant.recipe import Planned
from llmrun.quant.requantize import OPENED_KIND, opened, rounded
from llmrun.quant.roles import QUANTIZED_ROLES
from llmrun.store.model import LocalModel
from llmrun.text.tokenizer_files import tokenizer_files

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files beside the weights that a converted model keeps, where the source has them."""


MOST_ERROR = 0.5
"""Relative squared error of a weight that no quantizer here makes unless something is broken."""


def unsaid(note: str) -> None:
    """Say nothing."""


CONFIG_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True, eq=False)
class Conversion:
    """Everything about a conversion that is known before any weight is quantized.

    ``order``: the checkpoint's tensors as they are written. ``planned``: what becomes of each, by
    published name; ``content``: the finished folder. ``calibration``: the text to weigh errors by,
    read on what ``make_backend`` makes.
    """

    source: Source
    choice: Choice
    order: tuple[str, ...]
    planned: Mapping[str, Planned]
    content: Content
    calibration: Calibration | None
    make_backend: Callable[[], Backend]

    @property
    def predicted_bytes(self) -> int:
        """Bytes of the finished folder."""
        return self.content.predicted_bytes

    @property
    def quantized(self) -> int:
        """Number of weights the scheme covers."""
        return sum(planned.scheme is not None for planned in self.planned.values())

    def refuse_excess(self, *, allow_partial: bool) -> None:
        """Raise what ``write`` would at its end, as far as headers tell: UnavailableError if
        weights that no group divides take the model too far above what the scheme promises."""
        expected = CoverageBuilder(self.choice.scheme)
        for name, (role, shape, kind) in weights_to_plan(
            self.choice, self.source, resident=False
        ).items():
            if role in QUANTIZED_ROLES and is_dense(kind):
                expected.expect(name, role, shape, kind, self.planned[name])
        expected.finish(allow_partial=allow_partial)

    def write(
        self,
        out: Path,
        progress: Progress | None = None,
        between: Callable[[], None] = nothing,
        on_note: Callable[[str], None] = unsaid,
        *,
        allow_partial: bool = False,
    ) -> tuple[WrittenReport, Coverage]:
        """Write into the folder ``out``: empty, or left by a call that was ended; see
        ``formats.write`` for the errors. ``between`` is called now and then, and may raise;
        ``on_note`` is told what the calibration text could not do.

        UnavailableError if the result takes over 10 % more bits than the scheme promises, unless
        ``allow_partial``.
        """
        audited: list[Coverage] = []

        def audit(tensors: Iterator[tuple[str, Form]]) -> Mapping[str, object]:
            audited.append(self.audited(tensors, allow_partial=allow_partial))
            return {"coverage": coverage_facts(audited[0])}

        def tensors(start: int) -> Iterator[Item]:
            return self._tensors(start, between, on_note)

        report = write_folder(out, tensors, self.content, progress, audit)
        return report, audited[0]

    def audited(self, tensors: Iterator[tuple[str, Form]], *, allow_partial: bool) -> Coverage:
        """Bits and bytes of the tensors as they were written, held against what was planned."""
        coverage = CoverageBuilder(self.choice.scheme)
        weights = self.source.published_weights()
        for name, form in tensors:
            coverage.add(name, weights[name][0], form, self.planned[name])
        return coverage.finish(allow_partial=allow_partial)

    def _tensors(
        self, start: int, between: Callable[[], None], on_note: Callable[[str], None]
    ) -> Iterator[Item]:
        if self.calibration is not None:
            yield from self._calibrated(self.calibration, start, between, on_note)
            return
        for name in self.order[start:]:
            between()
            yield self._converted(name)

    def _calibrated(
        self,
        calibration: Calibration,
        start: int,
        between: Callable[[], None],
        on_note: Callable[[str], None],
    ) -> Iterator[Item]:
        """Layers before ``start`` are quantized again: the states behind them are needed."""
        runner = LayerCalibrator(
            self.source, self.make_backend(), calibration, gram=calibration.is_text, between=between
        )
        last = len(self.source.binding.spec.layers) - 1
        behind_layers = 1 + max(
            number
            for number, name in enumerate(self.order)
            if name in set(self.source.tensors_of(last))
        )
        position = 0
        for layer, names in self._parts():
            first, position = max(0, start - position), position + len(names)
            if layer is None:
                yield from map(self._converted, names[first:])
                continue
            if start >= behind_layers:
                continue  # all of them are written
            inputs = _prepared(runner.inputs_of(layer))
            items = [self._converted(name, inputs) for name in names]
            for note in sorted({note for own in inputs.values() for note in own.notes}):
                on_note(f"layer {layer}: {note}")
            if layer < last:  # nothing is read behind the last one
                runner.advance(layer, self._parameters(names, items))
            yield from items[first:]
            del inputs, items  # factors and sums of two layers at once would be too much
        if runner.unknown:
            on_note(
                f"the calibration text says too little of {len(runner.unknown)} linears "
                f"({runner.unknown[0]}, ...): their inputs count the same"
            )

    def _parts(self) -> Iterator[tuple[int | None, list[str]]]:
        """The tensors of each layer together, in their order; single ones (None) around them."""
        source, left = self.source, set(self.order)
        layers = {
            name: layer
            for layer in range(len(source.binding.spec.layers))
            for name in source.tensors_of(layer)
        }
        for name in self.order:
            if name not in left:
                continue
            layer = layers.get(name)
            names = [name] if layer is None else source.tensors_of(layer)
            left -= set(names)
            yield layer, names

    def _parameters(self, names: Collection[str], items: Collection[Item]) -> dict[str, Form]:
        """Tensors as they are written, as parameters by canonical name."""
        binding = self.source.binding
        return {
            canonical: form
            for name, (_, whole, _) in zip(names, items, strict=True)
            for canonical, form in binding.pieces_of(name, whole)
        }

    def _converted(self, name: str, inputs: Mapping[str, Prepared] | None = None) -> Item:
        binding = self.source.binding
        published, form = binding.published_tensor(name, self.source.checkpoint.read)
        planned = self.planned[published]
        first = binding.held[name].pieces[0].canonical
        if planned.scheme is None:
            # What no scheme covers is dense in the published format: norms, embedding, head.
            written = self._kinds[published]
            return published, rounded(opened(form), DType[written.upper()]), {}
        form = rounded(form, self.content.layout.scale_dtype)
        role = binding.parameters[first].role
        own = None if inputs is None else inputs.get(first)
        result = change(self.choice, role, planned, published, form, own)
        error = relative_mse(form, result)
        if not error <= MOST_ERROR:
            raise InternalError(
                f"{published}: quantized to {planned.scheme}, it keeps too little of the weight "
                f"(relative squared error {error:.3g}).",
                "Please report this with the model's name; another scheme may do.",
            )
        return published, result, {"relative_mse": float(f"{error:.4g}")}

    @cached_property
    def _kinds(self) -> dict[str, str]:
        return {tensor.name: tensor.kind for tensor in self.content.layout.planned}


def _prepared(inputs: Mapping[str, Inputs]) -> dict[str, Prepared]:
    """Made ready for quantizers, once for all linears that share their inputs."""
    distinct = {id(own): own for own in inputs.values()}
    ready = {key: compensation.prepare(own) for key, own in distinct.items()}
    return {name: ready[id(own)] for name, own in inputs.items()}


@dataclass(frozen=True)
class Recipe:
    """What a conversion does beyond its scheme, decided before any weight is quantized.

    ``calibration`` None: no text is read. ``widened``: units that get 8 bits.
    """

    calibration: Calibration | None = None
    widened: Collection[Unit] = ()


def prepare(
    source: Source,
    choice: Choice,
    local: LocalModel,
    recipe: Recipe,
    make_backend: Callable[[], Backend],
) -> Conversion:
    """Plan a conversion into the scheme of ``choice``. UnavailableError as ``refusal`` says."""
    scheme = choice.scheme
    assert scheme is not None
    reason = refusal(source)
    if reason is not None:
        again = " --requantize" if source.is_quantized else ""
        raise UnavailableError(
            f"the model cannot be written in {scheme.name}: {reason}",
            f"`llmrun chat -q {scheme.name}{again}` makes it while loading",
        )
    planned = plan_weights(choice, source, resident=False, widened=recipe.widened)
    dtype = model_dtype(choice, source, planned)
    order = tuple(layer_order(source))
    weights = source.published_weights()
    tensors = [
        _planned_tensor(name, weights[name], planned[name])
        for name in map(source.binding.published.__getitem__, order)
    ]
    dtype_key = "dtype" if "dtype" in source.binding.config else "torch_dtype"
    config = {**source.binding.config, dtype_key: CONFIG_DTYPES[dtype]}
    provenance = _provenance(source, choice, local, recipe)
    layout = plan_layout(tensors, DType[dtype.upper()], provenance.metadata)
    beside = {**sidecars(local.path, source), CARD_NAME: model_card(provenance, layout)}
    content = Content(layout, config, beside, provenance.document)
    return Conversion(source, choice, order, planned, content, recipe.calibration, make_backend)


def layer_order(source: Source) -> Iterator[str]:
    """The checkpoint's tensors: the embedding, layer after layer, then what comes behind them."""
    outer = source.tensors_of(None)
    before = [name for name in outer if "embed" in source.binding.published[name]]
    yield from before
    for layer in range(len(source.binding.spec.layers)):
        yield from source.tensors_of(layer)
    yield from (name for name in outer if name not in before)


def _planned_tensor(
    name: str, weight: tuple[object, tuple[int, ...], str], planned: Planned
) -> PlannedTensor:
    from llmrun.quant.scheme import find

    _, shape, kind = weight
    if planned.scheme is None:
        return PlannedTensor(name, kind if is_dense(kind) else OPENED_KIND, shape)
    scheme = find(planned.scheme)
    table = next((table for table in TABLES if scheme.name.startswith(table)), "")
    return PlannedTensor(
        name,
        scheme.kind(shape),
        shape,
        table=table,
        nested=scheme.name.endswith("-dq"),
        scale=DType.F32 if table or scheme.name == BNB_INT8 else None,
    )


def _provenance(source: Source, choice: Choice, local: LocalModel, recipe: Recipe) -> Provenance:
    text = recipe.calibration
    named = local.path.name if local.source in ("folder", "gguf") else local.origin
    return Provenance(
        tool=__version__,
        model=named,
        revision=local.revision,
        files={
            record.path: {"bytes": record.size, "sha256": record.sha256} for record in local.files
        },
        scheme=choice.name,
        recipe={"widened": [str(unit) for unit in sorted(recipe.widened)]},
        calibration=None
        if text is None
        else {"text": text.description, "tokens": text.tokens, "sha256": text.sha256},
        requantized_from=source.checkpoint.quantization if choice.requantized else None,
        license=license_of(local.path) if local.path.is_dir() else None,
    )


def coverage_facts(coverage: Coverage) -> dict[str, object]:
    """The audit as records keep it."""
    return {
        "requested_bits": round(coverage.requested_bits, 4),
        "actual_bits": round(coverage.actual_bits, 4),
        "partial": coverage.partial,
        "roles": {
            str(role): {
                "tensors": part.tensors,
                "weights": part.parameters,
                "bytes": part.nbytes,
                "bits_per_weight": round(part.bits_per_weight, 4),
            }
            for role, part in coverage.roles.items()
        },
        "kinds": dict(coverage.kinds),
        "unquantized": [
            {"name": kept.name, "kind": kept.kind, "reason": kept.reason}
            for kept in coverage.unquantized
        ],
    }


def sidecars(path: Path, source: Source) -> dict[str, bytes | Path]:
    """The files beside the weights that a conversion keeps: tokenizer, template, generation.

    A GGUF holds them as metadata; they become the files other tools read.
    """
    if source.checkpoint.layout == "gguf":
        return dict(tokenizer_files(source.checkpoint.config))
    return {name: path / name for name in COPIED if (path / name).is_file()}


def refusal(source: Source) -> str | None:
    """Why a model cannot be written as files; None if it can."""
    return source.binding.inexpressible


def model_dtype(choice: Choice, source: Source, planned: Mapping[str, Planned]) -> str:
    """The dtype of all scales of a written checkpoint: the one most covered weights have.

    ``planned``: of tensors by published name. Weights of another dtype are rounded to it before
    they are quantized.
    """
    weights = weights_to_plan(choice, source, resident=False)
    kinds = Counter(weights[name][2] for name in planned if planned[name].scheme is not None)
    return kinds.most_common(1)[0][0] if kinds else OPENED_KIND
