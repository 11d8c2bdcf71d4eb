"""An opened checkpoint: what its headers say, and its tensors one at a time.

A format module exports ``FORMAT`` (detect, open). Opening reads headers only and refuses damage
by name; tensors are mapped, not copied, and become storage forms when they are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmrun.kernels.forms import Form


@dataclass(frozen=True)
class TensorInfo:
    """A logical tensor as the headers describe it: N, K (or a vector's length) and stored bytes.

    ``kind`` names the stored type, e.g. ``BF16``, ``Q4_1`` or ``int4 g32``. ``opened``: no storage
    form holds it as it is stored, so it is read as plain numbers: F32, or BF16 where that is exact.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int
    opened: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """Headers of a checkpoint and a reader for its tensors.

    ``layout``: ``huggingface`` or ``gguf``; decides which names the tensors carry. ``config``:
    config.json, or a GGUF's metadata under its own keys. ``read(name)`` gives the storage form of
    one tensor of ``tensors``; ModelFileError if it is damaged, then or when its numbers are looked
    at. ``quantization``: None for a plain checkpoint, else a short description of how the file is
    quantized already. ``notes``: what its config asks for and llmrun does not do, in sentences.
    """

    path: Path
    layout: str
    config: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], Form] = field(repr=False)
    quantization: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Format:
    """What a format module exports as ``FORMAT``.

    ``open_exact``: where ``open`` rounds scales for the sake of memory, does not.
    """

    name: str
    detect: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]
    open_exact: Callable[[Path], Checkpoint] | None = None
