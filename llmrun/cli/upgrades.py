"""Finding the parts of a model that need 8 bits most: each is tried with fewer, alone.

In a layer that is otherwise untouched, one unit after another (``quant.mixing``) is quantized, and
what that changes in the hidden states behind the layer, relative to them, is its error. One pass
through the model, with one layer of weights in memory, tells it for all units. The KL divergence
that a unit alone makes at the end is 4 to 5 times this error for nearly all units of SmolLM2-135M;
trying that instead would take half a pass through the model for each unit.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from llmrun.cli.calibration import SEQUENCE_TOKENS, Calibration, drawn
from llmrun.cli.choice import Choice, change, plan_weights
from llmrun.cli.conversion import model_dtype
from llmrun.cli.source import Source
from llmrun.errors import ModelFileError, UsageError
from llmrun.kernels.forms import Form
from llmrun.kernels.host import DType
from llmrun.kernels.ops import Backend
from llmrun.model.spec import DecoderSpec
from llmrun.model.streaming import LayerStream
from llmrun.quant.deviation import StateError
from llmrun.quant.inputs import Inputs
from llmrun.quant.mixing import WIDE_SCHEME, Unit, Upgrade, budget_bytes, chosen, summary, unit_of
from llmrun.quant.moments import LayerMoments
from llmrun.quant.scheme import Scheme, find

SEQUENCES, TRIED_TOKENS = 4, 192
"""What each unit is tried on: enough to tell units apart, whose errors differ by factors."""

OnWork = Callable[[str, int, int], None]


def find_widened(
    source: Source,
    choice: Choice,
    target_bpw: float,
    calibration: Calibration | None,
    make_backend: Callable[[], Backend],
    on_work: OnWork,
) -> tuple[frozenset[Unit], str]:
    """The units that get 8 bits so that the linear layers have ``target_bpw`` bits per weight on
    average, and a sentence about them.

    Without a calibration the trials read ids drawn at random. UsageError for a target out of
    reach. ``on_work(what, done, in all)`` may raise to end the work.
    """
    scheme = choice.scheme
    assert scheme is not None
    sizes = _sizes(source, choice, scheme)
    if not sizes:
        raise UsageError(
            f"{scheme.name} covers none of the model's layers: nothing is left to get 8 bits",
            "leave --target-bpw out",
        )
    weights, base, wide = (sum(column) for column in zip(*sizes.values(), strict=True))
    budget = budget_bytes(target_bpw, weights, base, wide)
    errors = errors_of_units(source, choice, calibration, make_backend(), on_work)
    candidates = [
        Upgrade(unit, own_wide - own, errors[unit]) for unit, (_, own, own_wide) in sizes.items()
    ]
    widened = chosen(candidates, budget)
    read = "ids drawn at random" if calibration is None else calibration.description
    note = f"{len(widened)} of {len(sizes)} units get 8 bits ({summary(widened)}), tried on {read}"
    return widened, note


def errors_of_units(
    source: Source,
    choice: Choice,
    calibration: Calibration | None,
    backend: Backend,
    on_work: OnWork,
) -> dict[Unit, float]:
    """The relative squared error that each unit, quantized alone, makes behind its layer.

    ModelFileError if states are not finite.
    """
    spec = source.binding.spec
    planned = plan_weights(choice, source, resident=True)
    outer = source.outer()
    stream = _begun(spec, backend, _tried(spec, calibration), outer)
    reader = None if calibration is None else _begun(spec, backend, calibration.sequences, outer)
    del outer
    errors: dict[Unit, float] = {}
    for layer in range(len(spec.layers)):
        tensors = source.layer(layer)
        inputs = {} if reader is None else _inputs(reader, layer, tensors)
        trials = {}
        for unit in _units_of(source, layer):
            alone = dict(tensors)
            for name in _weights_of(source, unit):
                own = inputs.get(name)
                alone[name] = change(choice, unit.role, planned[name], name, tensors[name], own)
            trials[unit] = stream.fork()
            trials[unit].run_layer(layer, alone)
        stream.run_layer(layer, tensors)
        errors |= {unit: _error(stream, trial, unit) for unit, trial in trials.items()}
        on_work(f"layer {layer}", layer + 1, len(spec.layers))
    return errors


def _begun(
    spec: DecoderSpec,
    backend: Backend,
    sequences: Sequence[Sequence[int]],
    outer: Mapping[str, Form],
) -> LayerStream:
    stream = LayerStream(spec, backend, sequences)
    stream.embed(outer)
    return stream


def _error(stream: LayerStream, trial: LayerStream, unit: Unit) -> float:
    error = StateError()
    for right, own in zip(stream.states(), trial.states(), strict=True):
        error.add(right.values, own.values)
    if not error.finite:
        raise ModelFileError(
            f"the hidden states behind {unit} are not finite",
            "the weights are damaged or the model does not work: try it with `llmrun run`",
        )
    return error.relative


def _tried(spec: DecoderSpec, calibration: Calibration | None) -> list[Sequence[int]]:
    if calibration is None:
        calibration = drawn(spec.vocab, SEQUENCES * SEQUENCE_TOKENS)
    # Spread over the text: its passages differ.
    step = max(1, len(calibration.sequences) // SEQUENCES)
    return [ids[:TRIED_TOKENS] for ids in calibration.sequences[::step][:SEQUENCES]]


def _inputs(reader: LayerStream, layer: int, tensors: Mapping[str, Form]) -> Mapping[str, Inputs]:
    moments = LayerMoments()
    reader.run_layer(layer, tensors, moments.observe)
    found, _ = moments.inputs()
    return found


def _units_of(source: Source, layer: int) -> list[Unit]:
    units = (unit_of(name, p.role) for name, p in source.binding.parameters.items())
    return sorted({unit for unit in units if unit is not None and unit.layer == layer})


def _weights_of(source: Source, unit: Unit) -> list[str]:
    parameters = source.binding.parameters
    return [name for name, p in parameters.items() if unit_of(name, p.role) == unit]


def _sizes(source: Source, choice: Choice, scheme: Scheme) -> dict[Unit, tuple[int, int, int]]:
    """Weights of each unit, their bytes under the scheme, and in 8 bits."""
    written = plan_weights(choice, source, resident=False)
    dtype = DType[model_dtype(choice, source, written).upper()]
    sizes: dict[Unit, tuple[int, int, int]] = {}
    for name, planned in plan_weights(choice, source, resident=True).items():
        parameter = source.binding.parameters[name]
        unit = unit_of(name, parameter.role)
        if unit is None or planned.scheme is None:
            continue
        count, (n, k) = prod(parameter.shape), parameter.shape
        base, wide = (
            int(count * one.bits_per_weight((n, k), dtype)) // 8
            for one in (scheme, find(WIDE_SCHEME))
        )
        before = sizes.get(unit, (0, 0, 0))
        sizes[unit] = (before[0] + count, before[1] + base, before[2] + wide)
    return sizes
