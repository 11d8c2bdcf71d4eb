"""Writing a quantized checkpoint: the plan, the files beside the weights, the stream of tensors.

Used by ``llmrun quantize`` and, for models that are not quantized yet, by loading (the result is
kept in the store). What is written is compressed-tensors, which other engines load as well.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun import __version__
from llmrun.cli.choice import Choice, change, plan_weights, weights_to_plan
from llmrun.cli.source import Source, is_dense
from llmrun.errors import UnavailableError
from llmrun.formats.layout import Layout, plan_layout
from llmrun.formats.layout import Planned as PlannedTensor
from llmrun.formats.write import Progress, WrittenReport, predict_bytes, write_checkpoint
from llmrun.kernels.forms import Form
from llmrun.kernels.host import DType
from llmrun.quant.audit import Coverage, CoverageBuilder
from llmrun.quant.recipe import Planned
from llmrun.quant.requantize import OPENED_KIND, opened, rounded
from llmrun.quant.scheme import Scheme
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

CONFIG_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True, eq=False)
class Conversion:
    """Everything about a conversion that is known before any weight is read.

    ``planned``: what becomes of each tensor; ``layout``: where it goes; ``predicted_bytes`` of
    the finished folder. ``quantized``: how many weights the scheme covers.
    """

    source: Source
    choice: Choice
    planned: Mapping[str, Planned]
    layout: Layout
    config: Mapping[str, object]
    sidecars: Mapping[str, bytes | Path]
    provenance: Mapping[str, object]

    @property
    def predicted_bytes(self) -> int:
        """Bytes of the finished folder."""
        return predict_bytes(self.layout, self.config, self.sidecars, self.provenance)

    @property
    def quantized(self) -> int:
        """Number of weights the scheme covers."""
        return sum(planned.scheme is not None for planned in self.planned.values())

    def write(
        self, out: Path, progress: Progress | None = None, *, allow_partial: bool = False
    ) -> tuple[WrittenReport, Coverage]:
        """Write into the empty folder ``out``; see ``formats.write`` for the errors.

        UnavailableError if the result takes over 10 % more bits than the scheme promises, unless
        ``allow_partial``.
        """
        coverage = CoverageBuilder(self.choice.scheme)
        report = write_checkpoint(
            out,
            self._tensors(coverage),
            self.layout,
            self.config,
            self.sidecars,
            self.provenance,
            progress,
        )
        return report, coverage.finish(allow_partial=allow_partial)

    def _tensors(self, coverage: CoverageBuilder) -> Iterator[tuple[str, Form]]:
        weights = self.source.published_weights()
        kinds = {tensor.name: tensor.kind for tensor in self.layout.planned}

        def converted(name: str, form: Form) -> Form:
            planned, role = self.planned[name], weights[name][0]
            # What no scheme covers is dense in the published format: norms, embedding, head.
            covered = planned.scheme is not None
            if covered:
                form = rounded(form, self.layout.scale_dtype)
                result = change(self.choice, role, planned, name, form)
            else:
                result = rounded(opened(form), DType[kinds[name].upper()])
            coverage.add(name, role, result, planned)
            return result

        return self.source.published_tensors(converted)


def prepare(
    source: Source, choice: Choice, local: LocalModel, sidecars: Mapping[str, bytes | Path]
) -> Conversion:
    """Plan a conversion into the scheme of ``choice``. UnavailableError as ``refusal`` says."""
    scheme = choice.scheme
    assert scheme is not None
    reason = refusal(scheme, source)
    if reason is not None:
        again = " --requantize" if source.is_quantized else ""
        in_memory = f"`llmrun chat -q {scheme.name}{again}` makes it while loading"
        raise UnavailableError(
            f"the model cannot be written in {scheme.name}: {reason}",
            in_memory if source.binding.inexpressible else f"use int4 or int8; {in_memory}",
        )
    planned = plan_weights(choice, source, resident=False)
    dtype = _model_dtype(choice, source, planned)
    tensors = []
    for name, (_, shape, kind) in source.published_weights().items():
        scheme_name = planned[name].scheme
        written = kind if is_dense(kind) else OPENED_KIND
        if scheme_name is not None:
            written = scheme.kind(shape)
        tensors.append(PlannedTensor(name, written, shape))
    dtype_key = "dtype" if "dtype" in source.binding.config else "torch_dtype"
    config = {**source.binding.config, dtype_key: CONFIG_DTYPES[dtype]}
    provenance = {
        "llmrun": __version__,
        "source": {"model": local.origin, "revision": local.revision},
        "scheme": scheme.name,
        "requantized_from": source.checkpoint.quantization if choice.requantized else None,
    }
    layout = plan_layout(tensors, DType[dtype.upper()], {"format": "pt", "llmrun": __version__})
    return Conversion(source, choice, planned, layout, config, sidecars, provenance)


def sidecars(path: Path, source: Source) -> dict[str, bytes | Path]:
    """The files beside the weights that a conversion keeps: tokenizer, template, generation.

    A GGUF holds them as metadata; they become the files other tools read.
    """
    if source.checkpoint.layout == "gguf":
        return dict(tokenizer_files(source.checkpoint.config))
    return {name: path / name for name in COPIED if (path / name).is_file()}


def refusal(scheme: Scheme, source: Source) -> str | None:
    """Why a model cannot be written in a scheme as files other engines load; None if it can."""
    return source.binding.inexpressible or (
        None if scheme.publishable else scheme.reason_unpublishable
    )


def _model_dtype(choice: Choice, source: Source, planned: Mapping[str, Planned]) -> str:
    # All scales of a published checkpoint have one dtype, the model's: the dtype most covered
    # weights have. Weights of another one are rounded to it before they are quantized.
    weights = weights_to_plan(choice, source, resident=False)
    kinds = Counter(weights[name][2] for name in planned if planned[name].scheme is not None)
    return kinds.most_common(1)[0][0] if kinds else OPENED_KIND
