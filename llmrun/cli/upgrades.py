"""Finding the parts of a model that need 8 bits most: each is tried with 4, alone.

One unit after another (``quant.mixing``) is quantized in an otherwise untouched model, and the KL
divergence this makes at the end is its error. The trials go through the model side by side, layer
by layer: a trial of layer 5 begins as a copy of the untouched states before layer 5, so half of
the work is shared and one layer of weights is in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from llmrun.cli.calibration import SEQUENCE_TOKENS, Calibration, drawn
from llmrun.cli.choice import Choice, change, plan_weights
from llmrun.cli.source import Source
from llmrun.kernels.forms import Form
from llmrun.kernels.host import DType
from llmrun.kernels.ops import Backend
from llmrun.model.spec import DecoderSpec
from llmrun.model.streaming import LayerStream
from llmrun.quant.fidelity import mean_kl, predictions
from llmrun.quant.inputs import Inputs
from llmrun.quant.mixing import WIDE_SCHEME, Unit, Upgrade, budget_bytes, chosen, summary, unit_of
from llmrun.quant.moments import LayerMoments
from llmrun.quant.scheme import Scheme, find

SEQUENCES, TRIED_TOKENS = 4, 192
"""What each unit is tried on: enough to tell units apart, whose errors differ by factors."""

FIRST_SCORED = 32
"""The first tokens of a sequence say little: what comes next is anybody's guess."""

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

    Without a calibration text the trials read ids drawn at random. UsageError for a target out of
    reach. ``on_work(what, done, in all)`` may raise to end the work.
    """
    scheme = choice.scheme
    assert scheme is not None
    sizes = _sizes(source, choice, scheme)
    parameters = sum(weights for weights, _, _ in sizes.values())
    budget = budget_bytes(
        target_bpw,
        parameters,
        sum(base for _, base, _ in sizes.values()),
        sum(wide for _, _, wide in sizes.values()),
    )
    errors = measured_errors(source, choice, calibration, make_backend(), on_work)
    candidates = [
        Upgrade(unit, wide - base, errors[unit]) for unit, (_, base, wide) in sizes.items()
    ]
    widened = chosen(candidates, budget)
    read = "ids drawn at random" if calibration is None else calibration.description
    note = f"{len(widened)} of {len(sizes)} units get 8 bits ({summary(widened)}), tried on {read}"
    return widened, note


def measured_errors(
    source: Source,
    choice: Choice,
    calibration: Calibration | None,
    backend: Backend,
    on_work: OnWork,
) -> dict[Unit, float]:
    """The mean KL divergence (nats) that each unit makes when it alone is quantized."""
    spec = source.binding.spec
    sequences = _sequences(spec, calibration)
    planned = plan_weights(choice, source, resident=True)
    parameters = source.binding.parameters
    outer = source.outer()
    untouched = LayerStream(spec, backend, sequences)
    untouched.embed(outer)
    reader = None
    if calibration is not None:
        reader = LayerStream(spec, backend, calibration.sequences)
        reader.embed(outer)
    trials: LayerStream | None = None
    units: list[Unit] = []
    for layer in range(len(spec.layers)):
        on_work(f"layer {layer}", layer, len(spec.layers) + 1)
        tensors = source.layer(layer)
        inputs = {} if reader is None else _inputs(reader, layer, tensors)
        begun = []
        for unit in _units_of(source, layer):
            alone = dict(tensors)
            for name in _weights_of(source, unit):
                role = parameters[name].role
                own = inputs.get(name)
                alone[name] = change(choice, role, planned[name], name, tensors[name], own)
            trial = untouched.fork()
            trial.run_layer(layer, alone)
            units.append(unit)
            begun.append(trial)
        untouched.run_layer(layer, tensors)
        if trials is not None:
            trials.run_layer(layer, tensors)
            begun.insert(0, trials)
        trials = LayerStream.joined(begun)
    assert trials is not None
    on_work("logits", len(spec.layers), len(spec.layers) + 1)
    return _compared(untouched, trials, units, len(sequences), outer)


def _compared(
    untouched: LayerStream,
    trials: LayerStream,
    units: Sequence[Unit],
    n_sequences: int,
    outer: Mapping[str, Form],
) -> dict[Unit, float]:
    vocab = untouched.spec.vocab
    right = {
        (block.sequence, block.positions): predictions(block.logits, vocab)
        for block in untouched.logits(outer, FIRST_SCORED)
    }
    sums = [0.0] * len(units)
    for block in trials.logits(outer, FIRST_SCORED):
        trial, sequence = divmod(block.sequence, n_sequences)
        own = predictions(block.logits, vocab)
        sums[trial] += len(block.positions) * mean_kl(right[sequence, block.positions], own)
    positions = sum(len(of_block) for _, of_block in right)
    return {unit: total / positions for unit, total in zip(units, sums, strict=True)}


def _sequences(spec: DecoderSpec, calibration: Calibration | None) -> list[Sequence[int]]:
    if calibration is None:
        calibration = drawn(spec.vocab, SEQUENCES * SEQUENCE_TOKENS)
    # Spread over the text: its passages differ.
    all_of_them = calibration.sequences
    step = max(1, len(all_of_them) // SEQUENCES)
    return [ids[:TRIED_TOKENS] for ids in all_of_them[::step][:SEQUENCES]]


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
    wide = find(WIDE_SCHEME)
    dtype = DType.BF16
    sizes: dict[Unit, tuple[int, int, int]] = {}
    for name, planned in plan_weights(choice, source, resident=True).items():
        parameter = source.binding.parameters[name]
        unit = unit_of(name, parameter.role)
        if unit is None or planned.scheme is None:
            continue
        n, k = parameter.shape
        count = prod(parameter.shape)
        own = (int(count * one.bits_per_weight((n, k), dtype)) // 8 for one in (scheme, wide))
        more = (count, *own)
        before = sizes.get(unit, (0, 0, 0))
        sizes[unit] = (before[0] + more[0], before[1] + more[1], before[2] + more[2])
    return sizes
