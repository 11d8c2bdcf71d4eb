"""Where published checkpoints keep a decoder's parameters: other names, fused tensors, stacks.

A ``Layout`` belongs to an architecture file. It says for the tensors of a Hugging Face checkpoint
which rows of each are which parameter; what it does not mention carries its canonical name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from llmrun.model.config import LIMITS
from llmrun.model.parameters import Parameter

Shape = tuple[int, ...]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """What a tensor of a layer holds: the rows of ``parts`` one after another.

    ``parts`` are canonical parts of a layer, ``*`` standing for an expert's number. ``woven``:
    their rows alternate instead. ``stacked``: a tensor [E, N, K] (or [E, N]) that holds them for
    one expert after another. ``transposed``: its last two dimensions are exchanged.
    """

    parts: tuple[str, ...]
    woven: bool = False
    stacked: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Piece:
    """A parameter and its rows in a tensor seen as a matrix [rows, K] (a vector: [rows]).

    ``rows`` None: all of them, in order.
    """

    canonical: str
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class Layout:
    """The tensors of a checkpoint.

    ``places``: by the name of a module in a layer (``mlp.gate_up_proj``, for its weight and its
    bias alike) or of a tensor (``mlp.experts.gate_up_proj_bias``); experts by number are written
    ``*``. ``prefixes``: what may stand before ``layers``, ``embed_tokens`` and ``norm``.
    ``ignored``: patterns of tensors that belong to other parts of the model, with the reason.
    ``paired``: rotary pairs are next to each other in queries and keys instead of half a rotation
    apart.
    """

    places: Mapping[str, Place] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.",)
    ignored: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False

    def why_ignored(self, name: str) -> str | None:
        """Why a tensor is none of the decoder's; None if it is one."""
        found = (why for pattern, why in self.ignored.items() if re.match(pattern, name))
        return next(found, None)

    def bare(self, name: str) -> str:
        """What a tensor is called in a checkpoint of the language model alone."""
        prefix = next((p for p in self.prefixes if name.startswith(p)), None)
        if prefix is not None:
            return f"model.{name.removeprefix(prefix)}"
        # Wrappers put the head inside the language model, too.
        return "lm_head.weight" if name.endswith("lm_head.weight") else name

    def pieces(
        self, name: str, shape: Shape, parameters: Mapping[str, Parameter]
    ) -> tuple[tuple[Piece, ...], bool]:
        """The parameters in a tensor, and whether it is transposed.

        Names nobody knows, and stacks that are none, come back as they are: they are no parameters.
        """
        bare = self.bare(name)
        found = _LAYER.fullmatch(bare)
        if found is None:
            return (Piece(bare),), False
        layer, part = found.groups()
        place = self._place(part)
        parts = [f"model.layers.{layer}.{part}" for part in place.parts]
        if not place.stacked:
            return tuple(_one_after_another(parts, parameters)), place.transposed
        if len(shape) not in (2, 3) or not 1 <= shape[0] <= LIMITS["num_experts"]:
            return (Piece(bare),), False
        return tuple(_stack(parts, place, shape)), place.transposed

    def _place(self, part: str) -> Place:
        if part in self.places:
            return self.places[part]
        module, _, kind = part.rpartition(".")
        expert = _EXPERT.search(module + ".")
        if expert is not None:
            module = _EXPERT.sub("experts.*.", module + ".").removesuffix(".")
        # Stacks first: a place of the same name is then that of a tensor without ``.weight``.
        place = _STACKS.get(module) or self.places.get(module) or Place((module,))
        number = expert.group(1) if expert else "*"
        parts = (f"{name}.{kind}".replace("*", number) for name in place.parts)
        return Place(tuple(parts), place.woven, place.stacked, place.transposed)


_STACKS = {
    f"mlp.experts.{name}": Place((f"mlp.experts.*.{name}",), stacked=True)
    for name in ("gate_proj", "up_proj", "down_proj")
}
"""Experts of one projection in one tensor, as GGUF files have them."""


def _one_after_another(parts: list[str], parameters: Mapping[str, Parameter]) -> list[Piece]:
    if len(parts) == 1:
        return [Piece(parts[0])]
    pieces, start = [], 0
    for part in parts:
        count = parameters[part].shape[0] if part in parameters else 0
        pieces.append(Piece(part, range(start, start + count)))
        start += count
    return pieces


def _stack(parts: list[str], place: Place, shape: Shape) -> list[Piece]:
    n_experts = shape[0]
    # Rows of one expert, whichever way its matrix lies.
    n_rows = shape[1] if len(shape) == 2 else shape[2 if place.transposed else 1]
    share = n_rows // len(parts)
    pieces = []
    for expert in range(n_experts):
        start = expert * n_rows
        for number, part in enumerate(parts):
            if place.woven:
                rows = range(start + number, start + n_rows, len(parts))
            else:
                rows = range(start + number * share, start + (number + 1) * share)
            pieces.append(Piece(part.replace("*", str(expert)), rows))
    return pieces


def n_rows(shape: Shape, *, vector: bool, transposed: bool) -> int:
    """Rows of a tensor seen as a matrix (or, of biases, as one long vector)."""
    if vector:
        return prod(shape)
    return prod(shape[:-2]) * shape[-1] if transposed else prod(shape[:-1])


def half_split_rows(n_heads: int, head_dim: int, rotated: int | None = None) -> list[int]:
    """Row order that turns neighbouring rotary pairs into halves, head by head.

    Of each head's first ``rotated`` rows (None: all), row ``p * rotated/2 + i`` of the result is
    row ``2 i + p`` of the file; the others stay.
    """
    rotated = head_dim if rotated is None else rotated
    order = [2 * i + p for p in (0, 1) for i in range(rotated // 2)]
    order += range(rotated, head_dim)
    return [head * head_dim + row for head in range(n_heads) for row in order]
