"""Where every byte of a checkpoint goes, decided before any of it exists.

Planned from names, kinds and shapes alone: shards of at most 4 GB, data from byte 4,096 on,
tensors in the order given with each one's parts side by side. Parts whose size is no multiple of
64 bytes stand at the end of their shard, so that all large ones stay aligned.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from llmrun.errors import InternalError, UnavailableError
from llmrun.formats.limits import SHARD_BYTES, SHARD_PARTS
from llmrun.formats.pack_config import GROUPS, Packing
from llmrun.formats.safetensors import INDEX_NAME, SINGLE_NAME
from llmrun.formats.safetensors_header import BITS
from llmrun.kernels.forms import ROW
from llmrun.kernels.host import DType

ALIGNMENT = 64
DATA_START = 4_096
_KIND = re.compile(r"int([48]) (?:g(\d+)|row)")


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its logical name, the ``kind`` of its form, and its shape."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def module(self) -> str:
        """Name of the module a ``.weight`` belongs to."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class Part:
    """A stored tensor; ``begin`` counts from the start of the shard's data."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    begin: int = 0


@dataclass(frozen=True)
class Shard:
    """A file: its name, its header (with the length in front) and the parts by logical name."""

    file: str
    header: bytes
    parts: Mapping[str, tuple[Part, ...]]
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The whole plan. ``packings``: how each packed module is stored."""

    planned: tuple[Planned, ...]
    shards: tuple[Shard, ...]
    packings: Mapping[str, Packing]
    scale_dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def index(self) -> dict[str, object]:
        """The content of the index file."""
        places = {
            part.key: shard.file
            for shard in self.shards
            for part in chain.from_iterable(shard.parts.values())
        }
        data = sum(p.nbytes for s in self.shards for p in chain.from_iterable(s.parts.values()))
        return {"metadata": {"total_size": data}, "weight_map": places}


def plan_layout(
    planned: Iterable[Planned],
    scale_dtype: DType,
    metadata: Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
) -> Layout:
    """Return where everything goes.

    ``scale_dtype``: the model's dtype, which all scales have. Raises UnavailableError for a form
    that the published format cannot express (lookup tables, minima).
    """
    tensors = tuple(planned)
    packings = {}
    pending: list[dict[str, tuple[Part, ...]]] = [{}]
    filled = count = 0
    for tensor in tensors:
        packing = packing_of(tensor)
        if packing is not None:
            packings[tensor.module] = packing
        parts = _parts(tensor, packing, scale_dtype)
        size = sum(part.nbytes for part in parts)
        full = filled + size > shard_bytes or count + len(parts) > SHARD_PARTS
        if pending[-1] and full:
            pending.append({})
            filled = count = 0
        pending[-1][tensor.name] = parts
        filled, count = filled + size, count + len(parts)
    if len(tensors) != sum(map(len, pending)):
        raise InternalError("A tensor was planned twice.")
    files = (
        [SINGLE_NAME]
        if len(pending) == 1
        else [f"model-{n:05}-of-{len(pending):05}.safetensors" for n in range(1, len(pending) + 1)]
    )
    shards = tuple(_shard(f, p, metadata) for f, p in zip(files, pending, strict=True))
    return Layout(tensors, shards, packings, scale_dtype)


def packing_of(tensor: Planned) -> Packing | None:
    """Return how a tensor is packed, None for a dense one; UnavailableError if it cannot be."""
    if tensor.kind.upper() in DType.__members__:
        return None
    match = _KIND.fullmatch(tensor.kind)
    if match is None:
        raise UnavailableError(
            f"{tensor.name} as {tensor.kind} cannot be written: published checkpoints hold "
            "symmetric integers only.",
            "Quantize with -q int4 (or int8), or run without writing (no -o).",
        )
    packing = Packing(int(match[1]), int(match[2]) if match[2] else ROW)
    narrow = len(tensor.shape) != 2 or tensor.shape[1] * packing.bits % 32
    if narrow or packing.group not in (ROW, *GROUPS) or not tensor.name.endswith(".weight"):
        raise UnavailableError(
            f"{tensor.name} {tensor.shape} as {tensor.kind} cannot be written: packed are "
            "matrices named .weight, in groups of 32, 64, 128 or a row.",
            "Keep this tensor unquantized.",
        )
    return packing


def _parts(tensor: Planned, packing: Packing | None, scale_dtype: DType) -> tuple[Part, ...]:
    if packing is None:
        return (_part(tensor.name, tensor.kind.upper(), tensor.shape),)
    n, k = tensor.shape
    return (
        _part(f"{tensor.name}_packed", "I32", (n, k * packing.bits // 32)),
        _part(f"{tensor.name}_scale", scale_dtype.name, (n, k // (packing.group or k))),
        _part(f"{tensor.name}_shape", "I64", (2,)),
    )


def _part(key: str, dtype: str, shape: tuple[int, ...]) -> Part:
    elements = 1
    for extent in shape:
        elements *= extent
    return Part(key, dtype, shape, elements * BITS[dtype] // 8)


def _shard(file: str, parts: Mapping[str, Sequence[Part]], metadata: Mapping[str, str]) -> Shard:
    """Give every part its place; a stable sort keeps the tensors of a layer together."""

    def order(item: tuple[str, Part]) -> tuple[bool, int]:
        odd = item[1].nbytes % ALIGNMENT != 0
        # Wider elements first, so that every element is aligned to its own size.
        return odd, -BITS[item[1].dtype] if odd else 0

    placed: dict[str, list[Part]] = {name: [] for name in parts}
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for name, part in sorted(((n, p) for n, own in parts.items() for p in own), key=order):
        end = position + part.nbytes
        header[part.key] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [position, end],
        }
        placed[name].append(Part(part.key, part.dtype, part.shape, part.nbytes, position))
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // DATA_START) * DATA_START - 8
    raw = length.to_bytes(8, "little") + text.ljust(length)
    own = {name: tuple(found) for name, found in placed.items()}
    return Shard(file, raw, own, len(raw) + position)


def json_bytes(value: object) -> bytes:
    """Return JSON as it is written to files: the same bytes for the same value."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


RESERVED = frozenset((INDEX_NAME, SINGLE_NAME))
"""Names the writer uses whatever the model."""
