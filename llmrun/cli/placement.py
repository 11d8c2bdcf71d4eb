"""Which layers of a model a card takes when they do not all fit, and what that costs per token.

The last layers and the head lie on the device, the first ones on the host with an embedding that
is no head: a token then crosses once. Decided from sizes alone, before a weight is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.cli.memory import Room, gib
from llmrun.errors import DoesNotFitError
from llmrun.kernels.sides import Side
from llmrun.model.parameters import EMBEDDING, layer_of


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model's weights in one memory: each layer's, the embedding's, the head's (0 if
    it is the embedding); and of each layer's, those that one token reads."""

    layers: tuple[float, ...]
    embedding: float
    head: float
    read: tuple[float, ...]

    @property
    def tied(self) -> bool:
        """Whether the embedding is the head as well."""
        return self.head == 0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.layers) + self.embedding + self.head

    def scaled(self, factor: float) -> "Footprint":
        """The same model where everything takes ``factor`` times as much, to keep, not to read."""
        layers = tuple(factor * layer for layer in self.layers)
        return Footprint(layers, factor * self.embedding, factor * self.head, self.read)


@dataclass(frozen=True)
class Split:
    """``layers``: the side of each; the head lies on the device, the embedding with it or apart.

    ``device_read`` and ``host_read``: bytes of weights one token reads there.
    """

    layers: tuple[Side, ...]
    embedding: Side
    device_read: float
    host_read: float
    host_bytes: float

    @property
    def n_host(self) -> int:
        """Layers on the host."""
        return self.layers.count(Side.HOST)

    def side(self, name: str) -> Side:
        """Where a parameter lies, by its canonical name."""
        layer = layer_of(name)
        if layer is not None:
            return self.layers[layer]
        return self.embedding if name == EMBEDDING else Side.DEVICE

    def seconds_per_token(
        self, device_bandwidth: float, host_bandwidth: float
    ) -> tuple[float, ...]:
        """Seconds a token takes on device and host if each only reads its weights, at so many
        bytes per second."""
        return self.device_read / device_bandwidth, self.host_read / host_bandwidth


@dataclass(frozen=True)
class Sizing:
    """What a placement is decided from, beside the weights: bytes of cache per layer at the context
    wanted, and what each side works in."""

    kv_layer_bytes: int
    device_workspace: int
    host_workspace: int


def place(
    on_device: Footprint, on_host: Footprint, sizing: Sizing, device: Room, host: Room
) -> Split:
    """As many layers on the device as fit there. DoesNotFitError if not one does, or if the others
    do not fit on the host."""
    n_layers = len(on_device.layers)
    outer = on_device.embedding if on_device.tied else on_device.head
    left = (device.free_bytes or 0) - sizing.device_workspace - outer
    taken = _fitting([size + sizing.kv_layer_bytes for size in reversed(on_device.layers)], left)
    if taken == 0:
        one = on_device.layers[-1] + sizing.kv_layer_bytes
        raise DoesNotFitError(
            f"not one layer fits on the card: head and work take "
            f"{gib(outer + sizing.device_workspace)}, a layer with its cache {gib(one)}, and "
            f"{gib(device.free_bytes or 0)} of {device.name} are free",
            "use a smaller --ctx, fewer bits (-q int4), or --device cpu",
        )
    n_host = n_layers - taken
    embedding = 0.0 if on_device.tied else on_host.embedding
    host_bytes = sum(on_host.layers[:n_host]) + embedding
    needed = host_bytes + n_host * sizing.kv_layer_bytes + sizing.host_workspace
    if host.free_bytes is not None and needed > host.free_bytes:
        raise DoesNotFitError(
            f"{taken} of {n_layers} layers fit on the card; the others need {gib(needed)}, and "
            f"{gib(host.free_bytes)} of {host.name} are free",
            "use a smaller --ctx, fewer bits (-q int4), or a smaller model",
        )
    return Split(
        layers=(Side.HOST,) * n_host + (Side.DEVICE,) * taken,
        embedding=Side.DEVICE if on_device.tied else Side.HOST,
        device_read=sum(on_device.read[n_host:]) + outer,
        host_read=sum(on_host.read[:n_host]),
        host_bytes=host_bytes,
    )


def _fitting(sizes: Sequence[float], room: float) -> int:
    """How many of them fit, from the first on."""
    for count, size in enumerate(sizes):
        room -= size
        if room < 0:
            return count
    return len(sizes)
