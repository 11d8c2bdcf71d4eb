"""Whether a model fits, with which context, on which devices: planned before a weight is read."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from llmrun.cli import memory
from llmrun.cli.choice import Choice, plan_weights, weights_to_plan
from llmrun.cli.memory import Need, Room
from llmrun.cli.placement import Footprint, Sizing, Split, place
from llmrun.cli.source import Source
from llmrun.cli.units import ms, rate, size
from llmrun.errors import UnavailableError
from llmrun.kernels.host import DType
from llmrun.kernels.offload import OffloadBackend
from llmrun.kernels.ops import KV_FORMS, Backend, Sizes
from llmrun.kernels.sides import Side
from llmrun.model.decoder import MAX_ROWS
from llmrun.model.parameters import EMBEDDING, HEAD, layer_of
from llmrun.model.spec import DecoderSpec
from llmrun.quant.gguf_blocks import BLOCK_TYPES
from llmrun.quant.roles import QUANTIZED_ROLES, Role
from llmrun.quant.scheme import find

IDLE_OFFLOAD = "--offload changes nothing: everything lies in the memory of the CPU"

OFFLOADED_CONTEXT = 4096
"""An automatic context where layers do not fit on a card: each token of it takes room from them."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is to be loaded: weights of ``source`` as ``choice`` says, with a cache of ``kv_form``.

    ``ctx`` None: as long a context as fits. ``target_bpw`` as in ``CopyOptions``.
    """

    choice: Choice
    source: Source
    kv_form: str
    ctx: int | None = None
    target_bpw: float | None = None

    @property
    def spec(self) -> DecoderSpec:
        """The decoder it is."""
        return self.source.binding.spec

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers."""
        heads = self.spec.heads
        per_layer = 2 * heads.n_kv_heads * heads.head_dim * KV_FORMS[self.kv_form]
        return int(per_layer * len(self.spec.layers))


@dataclass(frozen=True, eq=False)
class Fitted:
    """Where a model is to run, and how long its context is.

    ``place`` is told the canonical name of each weight before the backend gets it. ``price``: what
    layers on the CPU cost, to be said before the wait for loading. ``notes`` are worth a line.
    """

    backend: Backend
    context: int
    place: Callable[[str], None] = lambda name: None
    price: str | None = None
    notes: tuple[str, ...] = ()


def fit(wanted: Wanted, backend: Backend, make_host: Callable[[], Backend] | None) -> Fitted:
    """Plan the memory of weights, cache and work.

    ``make_host``: makes the backend for layers that do not fit on the device; None if they must.
    DoesNotFitError with the numbers if it does not fit; UnavailableError if the device has no cache
    of the form.
    """
    spec = wanted.spec
    backend.kv_layer(1, 1, spec.heads, wanted.kv_form)  # refused here, not after loading
    footprint = footprint_of(wanted, backend)
    per_token = wanted.kv_bytes_per_token
    free, working = (
        backend.free_bytes(),
        backend.workspace_bytes(sizes_of(wanted.source, backend.prefill_tokens)),
    )
    if free is None or working is None:
        need, room = Need(int(footprint.total), per_token), memory.host_room()
        context, note = memory.fit_context(need, wanted.ctx, spec.max_positions, room)
        return Fitted(backend, context, notes=_given(note, IDLE_OFFLOAD if make_host else None))
    on_device = footprint.scaled(memory.ROUNDED)
    need = Need(int(on_device.total), per_token, working)
    room = Room(f"memory of {backend.device}", free, on_device=True)
    least = wanted.ctx or min(spec.max_positions, OFFLOADED_CONTEXT)
    if make_host is not None and not memory.fits(need, least, room):
        memory.check_trained(wanted.ctx, spec.max_positions)
        sizing = Sizing(per_token * least // len(spec.layers), working, memory.WORKSPACE_BYTES)
        return _divided(wanted, least, (backend, make_host()), on_device, sizing, room)
    context, note = memory.fit_context(need, wanted.ctx, spec.max_positions, room)
    return Fitted(backend, context, notes=_given(note))


def _divided(
    wanted: Wanted,
    context: int,
    backends: tuple[Backend, Backend],
    on_device: Footprint,
    sizing: Sizing,
    room: Room,
) -> Fitted:
    """The layers divided between device and host."""
    device, host = backends
    spec = wanted.spec
    try:
        host.kv_layer(1, 1, spec.heads, wanted.kv_form)
    except UnavailableError as err:
        other_form = "" if wanted.kv_form == "f16" else "use --kv f16, or "
        raise UnavailableError(
            f"the model does not fit on {device.device}, and with --offload the layers that do not "
            f"run on the CPU: {err.what}",
            f"{other_form}choose a model or scheme that fits on {device.device} without --offload",
        ) from err
    split = place(on_device, footprint_of(wanted, host), sizing, room, memory.host_room())
    shorter = context < spec.max_positions
    note = f"context {context} of {spec.max_positions} tokens (--ctx sets it)" if shorter else None
    backend = OffloadBackend(device, host, split.layers)
    return Fitted(
        cast(Backend, backend),  # it takes only the handles it made itself
        context,
        place=lambda name: backend.place(split.side(name)),
        price=price_of(split, device, host),
        notes=_given(note),
    )


def price_of(split: Split, device: Backend, host: Backend) -> str:
    """How slow a split will be, predicted from the bandwidths of both memories, measured now."""
    seconds = split.seconds_per_token(device.measure_bandwidth(), host.measure_bandwidth())
    on_device, on_host = (ms(1e3 * part) for part in seconds)
    outer = " and the embedding" if split.embedding is Side.HOST else ""
    return (
        f"offload: {split.n_host} of {len(split.layers)} layers{outer} ({size(split.host_bytes)}) "
        f"stay on the CPU. Predicted: {ms(1e3 * sum(seconds))} per token "
        f"({rate(1 / sum(seconds))}), of them {on_device} on {device.device} and {on_host} on the "
        "CPU"
    )


def sizes_of(source: Source, max_tokens: int) -> Sizes:
    """What the working memory of a model's decoder depends on."""
    spec = source.binding.spec
    in_layers = (
        math.prod(shape)
        for role, shape, _ in source.weights().values()
        if role not in (Role.EMBEDDING, Role.HEAD)
    )
    return Sizes(
        max_tokens=max_tokens,
        max_rows=MAX_ROWS,
        hidden=spec.hidden,
        intermediate=_inner(spec),
        vocab=spec.vocab,
        heads=spec.heads,
        largest=max(in_layers),
    )


def _inner(spec: DecoderSpec) -> int:
    """The width of an MLP. A step of a mixture works in those of an expert, beside the memory for
    one of all tokens; three of this width hold both."""
    if spec.mixture is None:
        return spec.intermediate
    return spec.mixture.intermediate + math.ceil(spec.intermediate / 3)


def footprint_of(wanted: Wanted, backend: Backend) -> Footprint:
    """Bytes of the weights as they will lie in a backend's memory."""
    spec = wanted.spec
    layers, read = [0.0] * len(spec.layers), [0.0] * len(spec.layers)
    outer = {EMBEDDING: 0.0, HEAD: 0.0}
    mixture = spec.mixture
    chosen = 1.0 if mixture is None else mixture.top_k / mixture.n_experts
    roles = wanted.source.weights()
    for name, n_bytes in _bytes_by_name(wanted, backend):
        layer = layer_of(name)
        if layer is None:
            outer[name] = outer.get(name, 0.0) + n_bytes
            continue
        layers[layer] += n_bytes
        read[layer] += n_bytes * (chosen if roles[name][0] is Role.EXPERTS else 1.0)
    return Footprint(tuple(layers), outer[EMBEDDING], outer[HEAD], tuple(read))


def _bytes_by_name(wanted: Wanted, backend: Backend) -> Iterator[tuple[str, float]]:
    choice, source = wanted.choice, wanted.source
    planned = plan_weights(choice, source, resident=True)
    kept = source.kept_bytes()
    for name, (role, shape, kind) in weights_to_plan(choice, source, resident=True).items():
        scheme = planned[name].scheme
        if scheme is None:
            yield name, kept[name] + backend.widening(form_kind(kind)) * math.prod(shape) / 8
            continue
        n, k = shape
        bits = find(scheme).bits_per_weight((n, k), DType[kind.upper()])
        if role in QUANTIZED_ROLES:
            bits = max(bits, wanted.target_bpw or 0)
        yield name, n * k * bits / 8


def form_kind(kind: str) -> str:
    """The kind of the storage form a stored kind becomes."""
    blocks = BLOCK_TYPES.get(kind.upper())
    return kind if blocks is None else blocks.form_kind


def _given(*notes: str | None) -> tuple[str, ...]:
    return tuple(note for note in notes if note is not None)
