"""A model on its way through a calibration text, layer by layer, beside its quantizing.

For each layer in order: ``inputs_of`` runs it as it was and tells what its linears saw; then the
layer is quantized, and ``advance`` runs the result. What the next layer sees are then the states
that the quantized model has there.
"""

from collections.abc import Callable, Mapping, Sequence

from llmrun.cli.calibration import Calibration
from llmrun.cli.source import Source
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import Backend
from llmrun.model.parameters import layer_of
from llmrun.model.streaming import LayerStream, nothing
from llmrun.quant.inputs import Inputs
from llmrun.quant.moments import LayerMoments, gram_bytes
from llmrun.quant.roles import QUANTIZED_ROLES, Role

GRAM_BYTES = 1 << 30
"""Most that the products of columns of one layer may take: experts by the hundred go without."""


class LayerCalibrator:
    """Runs ``source`` on the text; one layer of weights is in memory at a time, besides the states.

    ``gram``: products of columns are summed as well, for error compensation. ``propagate`` False:
    every layer sees the states of the unquantized model, and ``advance`` does nothing. ``between``
    is called now and then, and may raise to end the work. ``unknown``: linears so far whose inputs
    the text says too little of.
    """

    def __init__(
        self,
        source: Source,
        backend: Backend,
        calibration: Calibration,
        *,
        gram: bool,
        propagate: bool = True,
        between: Callable[[], None] = nothing,
    ) -> None:
        self.unknown: list[str] = []
        self._source = source
        self._gram = gram
        self._propagate = propagate
        self._widths = _widths(source)
        spec = source.binding.spec
        self._stream = LayerStream(spec, backend, calibration.sequences, between=between)
        self._stream.embed(source.outer())

    def inputs_of(
        self, number: int, replaced: Mapping[str, Form] | None = None
    ) -> Mapping[str, Inputs]:
        """What the quantized linears of a layer see, by the canonical names of their weights.

        ``replaced``: parameters of the layer that are quantized already, whose effect on the
        others is wanted; the layer may be asked several times (with ``propagate``).
        ModelFileError that names a linear if an input is not finite.
        """
        widths = self._widths[number]
        moments = LayerMoments(self._summed(widths))
        stream = self._stream.fork() if self._propagate else self._stream
        tensors = self._source.layer(number) | dict(replaced or {})
        stream.run_layer(number, tensors, moments.observe)
        found, unknown = moments.inputs(widths)
        self.unknown += [name for name in unknown if name in widths and name not in self.unknown]
        return {name: inputs for name, inputs in found.items() if name in widths}

    def advance(self, number: int, tensors: Mapping[str, Form]) -> None:
        """Run the layer as it was quantized: all its parameters by canonical name."""
        if self._propagate:
            self._stream.run_layer(number, tensors)

    def _summed(self, widths: Mapping[str, int]) -> Callable[[Sequence[str]], bool]:
        parameters = self._source.binding.parameters
        experts = {name for name in widths if parameters[name].role is Role.EXPERTS}
        # Gate and up of an expert share theirs: two of three projections, counted once.
        needed = sum(gram_bytes(widths[name]) for name in experts if "gate_proj" not in name)
        with_experts = needed <= GRAM_BYTES

        def summed(names: Sequence[str]) -> bool:
            wanted = names[0] in widths and (with_experts or names[0] not in experts)
            return self._gram and wanted

        return summed


def _widths(source: Source) -> dict[int, dict[str, int]]:
    """Inputs [K] of the linears of each layer that schemes cover."""
    widths: dict[int, dict[str, int]] = {}
    for name, parameter in source.binding.parameters.items():
        number = layer_of(name)
        if number is not None and parameter.role in QUANTIZED_ROLES:
            widths.setdefault(number, {})[name] = parameter.shape[1]
    return widths
