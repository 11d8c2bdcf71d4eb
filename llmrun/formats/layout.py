"""Where every byte of a checkpoint goes, decided before any of it exists.

Planned from names, kinds and shapes alone: shards of limited size, data from byte 4,096 on,
tensors in the order given with each one's parts side by side. Parts whose size is no multiple of
64 bytes stand at the end of their shard, so that all large ones stay aligned. The kinds together
decide the format: what other engines load, wherever one of their formats can say it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from llmrun.errors import InternalError, UnavailableError
from llmrun.formats import bnb_rows_writer, bnb_writer, own_format, pack_writer
from llmrun.formats.limits import SHARD_BYTES, SHARD_PARTS
from llmrun.formats.planned import Part, Planned, Writing, part
from llmrun.formats.safetensors import INDEX_NAME, SINGLE_NAME
from llmrun.formats.safetensors_header import BITS
from llmrun.kernels.host import DType

ALIGNMENT = 64
DATA_START = 4_096
_WRITINGS = (
    pack_writer.WRITING,
    bnb_writer.WRITING,
    bnb_rows_writer.WRITING,
    own_format.WRITING,
)


@dataclass(frozen=True)
class Shard:
    """A file: its name, its header (with the length in front) and the parts by logical name."""

    file: str
    header: bytes
    parts: Mapping[str, tuple[Part, ...]]
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The whole plan. ``writing``: how quantized tensors are stored, None if there are none."""

    planned: tuple[Planned, ...]
    shards: tuple[Shard, ...]
    writing: Writing | None
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


def published_format(planned: Iterable[Planned]) -> Writing | None:
    """Return the format that tensors are written in, None where all are plain.

    ``compressed-tensors`` if all quantized ones are integers it can say, ``bitsandbytes`` if all
    are its nf4 or all its fp4, else llmrun's own. UnavailableError, naming the tensor, for one
    that none of them holds.
    """
    quantized = [tensor for tensor in planned if not tensor.is_plain]
    if not quantized:
        return None
    for writing in _WRITINGS:
        if writing.holds(quantized):
            return writing
    odd = next(tensor for tensor in quantized if not own_format.WRITING.holds([tensor]))
    raise UnavailableError(
        f"{odd.name} {odd.shape} as {odd.kind} cannot be written: quantized are matrices named "
        ".weight, in groups of 16, 32, 64, 128 or a row.",
        "Keep this tensor unquantized.",
    )


def plan_layout(
    planned: Iterable[Planned],
    scale_dtype: DType,
    metadata: Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
) -> Layout:
    """Return where everything goes.

    ``scale_dtype``: the model's dtype, which all scales have that say no other. Raises
    UnavailableError as ``published_format``.
    """
    tensors = tuple(planned)
    writing = published_format(tensors)
    pending: list[dict[str, tuple[Part, ...]]] = [{}]
    filled = count = 0
    for tensor in tensors:
        if writing is None or tensor.is_plain:
            parts: tuple[Part, ...] = (part(tensor.name, tensor.kind.upper(), tensor.shape),)
        else:
            parts = writing.parts(tensor, scale_dtype)
        size = sum(own.nbytes for own in parts)
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
    return Layout(tensors, shards, writing, scale_dtype)


def _shard(file: str, parts: Mapping[str, Sequence[Part]], metadata: Mapping[str, str]) -> Shard:
    """Give every part its place; a stable sort keeps the tensors of a layer together."""

    def order(item: tuple[str, Part]) -> tuple[bool, int]:
        odd = item[1].nbytes % ALIGNMENT != 0
        # Wider elements first, so that every element is aligned to its own size.
        return odd, -BITS[item[1].dtype] if odd else 0

    placed: dict[str, list[Part]] = {name: [] for name in parts}
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for name, one in sorted(((n, p) for n, own in parts.items() for p in own), key=order):
        end = position + one.nbytes
        header[one.key] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [position, end],
        }
        placed[name].append(replace(one, begin=position))
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
