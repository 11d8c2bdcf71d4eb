"""A fetched model with its headers read and matched to a decoder: nothing loaded yet."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmrun.formats.checkpoint import Checkpoint, TensorInfo
from llmrun.formats.open import open_checkpoint
from llmrun.kernels.forms import Form
from llmrun.model.binding import Binding, bind_gguf, bind_huggingface
from llmrun.model.parameters import layer_of
from llmrun.quant.gguf_blocks import BLOCK_TYPES
from llmrun.quant.recipe import DENSE_KINDS
from llmrun.quant.roles import Role

_FORM = re.compile(r"(int|lut)(?P<bits>\d) (g(?P<group>\d+)|row)(?P<mins> \+(min|zero))?")
"""Kinds of storage forms that take part of a byte per weight."""

Weight = tuple[Role, tuple[int, ...], str]
"""Role, shape and stored kind of a parameter: what a recipe decides on."""


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint and how its tensors become a decoder's parameters.

    ``exact``: no scale is rounded to 16 bits on the way.
    """

    checkpoint: Checkpoint
    binding: Binding
    exact: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether the file holds quantized weights already."""
        return self.checkpoint.quantization is not None

    def weights(self) -> dict[str, Weight]:
        """Every parameter by canonical name, in the checkpoint's order."""
        found = {}
        for name, held in self.binding.held.items():
            kind = self.checkpoint.tensors[name].kind.lower()
            for piece in held.pieces:
                parameter = self.binding.parameters[piece.canonical]
                found[piece.canonical] = (parameter.role, parameter.shape, kind)
        return found

    def opened(self) -> set[str]:
        """Parameters, and tensors by published name, that are read as plain numbers because no
        form holds them as they are stored."""
        found = set()
        for name, held in self.binding.held.items():
            if self.checkpoint.tensors[name].opened:
                found |= {piece.canonical for piece in held.pieces}
                found.add(self.binding.published[name])
        return found

    def published_weights(self) -> dict[str, Weight]:
        """Every tensor by its published name: what a recipe for files decides on."""
        found = {}
        for name, held in self.binding.held.items():
            info = self.checkpoint.tensors[name]
            role = self.binding.parameters[held.pieces[0].canonical].role
            found[self.binding.published[name]] = (role, tuple(info.shape), info.kind.lower())
        return found

    def kept_bytes(self) -> dict[str, int]:
        """Bytes each parameter takes in memory if it is kept as it is stored, by canonical name.

        Some of GGUF's types take more than in the file, since they become simpler forms.
        """
        kept = {}
        for name, held in self.binding.held.items():
            info = self.checkpoint.tensors[name]
            whole, count = _kept_bytes(info, self.exact), math.prod(info.shape)
            for piece in held.pieces:
                share = math.prod(self.binding.parameters[piece.canonical].shape)
                kept[piece.canonical] = whole * share // count
        return kept

    def tensors(self, change: Callable[[str, Form], Form]) -> Iterator[tuple[str, Form]]:
        """Read the parameters one at a time, each through ``change(canonical name, form)``."""
        # By map, since a loop would hold each one while it reads the next.
        read = self.binding.tensors(self.checkpoint.read)
        yield from map(lambda found: (found[0], change(*found)), read)

    def layer(
        self, number: int, change: Callable[[str, Form], Form] | None = None
    ) -> dict[str, Form]:
        """Read one layer's parameters, as ``tensors`` does."""
        return self._some(number, change)

    def outer(self, change: Callable[[str, Form], Form] | None = None) -> dict[str, Form]:
        """Read the parameters in no layer: embedding, final norm, head."""
        return self._some(None, change)

    def _some(
        self, layer: int | None, change: Callable[[str, Form], Form] | None
    ) -> dict[str, Form]:
        return {
            canonical: form if change is None else change(canonical, form)
            for name in self.tensors_of(layer)
            for canonical, form in self.binding.parameters_in(name, self.checkpoint.read)
        }

    def tensors_of(self, layer: int | None) -> list[str]:
        """The checkpoint's names of the tensors of one layer; None: of those in no layer."""
        return self._places.get(layer, [])

    @cached_property
    def _places(self) -> dict[int | None, list[str]]:
        """The checkpoint's tensors of each layer (None: of no layer); a tensor lies in one."""
        places: dict[int | None, list[str]] = {None: []}
        for name, held in self.binding.held.items():
            places.setdefault(layer_of(held.pieces[0].canonical), []).append(name)
        return places

    def published_tensors(self, change: Callable[[str, Form], Form]) -> Iterator[tuple[str, Form]]:
        """Read whole tensors one at a time, each through ``change(published name, form)``."""
        for name, form in self.binding.published_tensors(self.checkpoint.read):
            yield name, change(name, form)


def open_source(path: Path, *, exact: bool = False) -> Source:
    """Open a model's files and match them with a decoder; ``exact`` as in ``Source``.

    ModelFileError if they are damaged, incomplete or of an unsupported architecture.
    """
    checkpoint = open_checkpoint(path, exact=exact)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    if checkpoint.layout == "gguf":
        binding = bind_gguf(checkpoint.config, shapes, checkpoint.read)
    else:
        binding = bind_huggingface(checkpoint.config, shapes, checkpoint.read)
    return Source(checkpoint, binding, exact)


def _kept_bytes(info: TensorInfo, exact: bool) -> int:
    count = math.prod(info.shape)
    if info.opened:
        return 4 * count
    blocks = BLOCK_TYPES.get(info.kind)
    if blocks is not None:
        wider = 16 * (1 + blocks.mins) / blocks.group if exact and blocks.products else 0.0
        return int((blocks.bits_per_weight + wider) * count) // 8
    form = _FORM.fullmatch(info.kind)
    if form is None:
        return info.nbytes
    # Scales may be wider than in the file: this is the most they can take.
    group = int(form["group"] or info.shape[-1])
    per_group = 32 + {None: 0, " +min": 32, " +zero": 8}[form["mins"]]
    return count * int(form["bits"]) // 8 + count // group * per_group // 8


def is_dense(kind: str) -> bool:
    """Whether a stored kind is a plain number type."""
    return kind in DENSE_KINDS
