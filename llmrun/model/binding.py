"""Matching a checkpoint with a decoder, from headers alone.

The result says which tensor fills which parameter. It exists only if every tensor is used and
every parameter filled with the right shape; otherwise a ModelFileError names the tensors.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Form, matrix, rows
from llmrun.model.architecture import Config, find, find_gguf
from llmrun.model.gguf import GgufFile
from llmrun.model.layout import Layout, Piece, Shape, half_split_rows, n_rows
from llmrun.model.parameters import EMBEDDING, HEAD, Parameter, expected, layer_name
from llmrun.model.spec import DecoderSpec, RopeByLength

Shapes = Mapping[str, Shape]
RECOMPUTED = re.compile(r".*rotary_emb\.inv_freq$")
"""Buffers that older checkpoints store and that follow from the config."""


@dataclass(frozen=True)
class Held:
    """What one tensor of a checkpoint holds: pieces of it, each a parameter."""

    pieces: tuple[Piece, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Binding:
    """A decoder's spec and where each of its parameters comes from.

    ``held``: by the checkpoint's names, in its order. ``published``: the Hugging Face name of each
    tensor. ``parameters``: by canonical name. ``config``: the Hugging Face config of the same
    decoder (of a model that also sees, the text model's own), unless ``inexpressible`` says why
    the weights cannot be written beside one. ``row_orders``: tensors whose rows the published
    checkpoint has in another order. ``unused``: tensors left out on purpose, with the reason.
    """

    spec: DecoderSpec
    config: Config
    held: Mapping[str, Held]
    parameters: Mapping[str, Parameter]
    unused: Mapping[str, str]
    published: Mapping[str, str]
    row_orders: Mapping[str, list[int]] = field(default_factory=dict)
    inexpressible: str | None = None

    def tensors(self, read: Callable[[str], Form]) -> Iterator[tuple[str, Form]]:
        """Read the parameters one tensor at a time, under their canonical names."""
        for name in self.held:
            yield from self.parameters_in(name, read)

    def parameters_in(self, name: str, read: Callable[[str], Form]) -> Iterator[tuple[str, Form]]:
        """Read one tensor: the parameters it holds, under their canonical names."""
        yield from self.pieces_of(name, self._in_published_order(name, read(name)))

    def pieces_of(self, name: str, form: Form) -> Iterator[tuple[str, Form]]:
        """The parameters in a tensor that has its rows in published order, as
        ``published_tensors`` gives it; ``name`` is the checkpoint's."""
        held = self.held[name]
        for piece in held.pieces:
            shape = self.parameters[piece.canonical].shape
            whole = matrix(form, vector=len(shape) == 1, transposed=held.transposed)
            yield piece.canonical, whole if piece.rows is None else rows(whole, piece.rows)

    def published_tensors(self, read: Callable[[str], Form]) -> Iterator[tuple[str, Form]]:
        """Read whole tensors one at a time, under their published names."""
        for name in self.held:
            yield self.published_tensor(name, read)

    def published_tensor(self, name: str, read: Callable[[str], Form]) -> tuple[str, Form]:
        """Read one tensor whole: its published name and its form."""
        return self.published[name], self._in_published_order(name, read(name))

    def _in_published_order(self, name: str, form: Form) -> Form:
        order = self.row_orders.get(name)
        return form if order is None else rows(form, order)


def bind_huggingface(config: Config, shapes: Shapes, read: Callable[[str], Form]) -> Binding:
    """Match a Hugging Face checkpoint (config.json and tensor shapes by name).

    ``read`` serves a head that the config ties to the embedding: files may hold another one, and
    then the file is right, as in the transformers library. It also serves biases that the model
    has no place for: GPTQ's tools write zeros for every linear.
    """
    arch = find(config.get("model_type"))
    spec, layout = arch.spec(config), arch.layout
    unused = {name: "recomputed from the config" for name in shapes if RECOMPUTED.match(name)}
    unused |= {n: why for n in shapes if (why := layout.why_ignored(n)) is not None}
    held = _held(layout, spec, {n: n for n in shapes if n not in unused}, shapes)
    names = {h.pieces[0].canonical: name for name, h in held.items()}
    if spec.tied and HEAD in names and EMBEDDING in names:
        if _same(read(names[HEAD]), read(names[EMBEDDING])):
            unused[names[HEAD]] = "the config ties the head to the embedding"
            del held[names[HEAD]]
        else:
            spec = replace(spec, tied=False)
    for name in _surplus_zeros(held, expected(spec), shapes, read):
        unused[name] = "a bias of zeros where the model has none"
        del held[name]
    inexpressible = _stacked(name for name in held if len(shapes[name]) > 2)
    published = {name: layout.bare(name) for name in held}
    if arch.text is not None:
        config = dict(arch.text(config))
        config["architectures"] = [find(config["model_type"]).class_names[0]]
    return _matched(spec, config, held, shapes, unused, published, {}, inexpressible)


def _surplus_zeros(
    held: Mapping[str, Held],
    parameters: Mapping[str, Parameter],
    shapes: Shapes,
    read: Callable[[str], Form],
) -> list[str]:
    return [
        name
        for name, what in held.items()
        if name.endswith(".bias")
        and len(shapes[name]) == 1
        and not any(piece.canonical in parameters for piece in what.pieces)
        and all(_is_zero(array.data) for array in read(name).arrays.values())
    ]


def _is_zero(data: memoryview) -> bool:
    return bytes(data).count(0) == data.nbytes


def _same(one: Form, other: Form) -> bool:
    """Whether two weights are the same to the bit."""
    if (one.kind, one.shape) != (other.kind, other.shape):
        return False
    pairs = zip(one.arrays.values(), other.arrays.values(), strict=True)
    return all(_same_bytes(a.data, b.data) for a, b in pairs)


def _same_bytes(one: memoryview, other: memoryview) -> bool:
    # Memoryviews compare byte by byte in Python's time, bytes at the speed of memory.
    step = 1 << 20
    return len(one) == len(other) and all(
        bytes(one[start : start + step]) == bytes(other[start : start + step])
        for start in range(0, len(one), step)
    )


def bind_gguf(metadata: Config, shapes: Shapes, read: Callable[[str], Form]) -> Binding:
    """Match a GGUF file (metadata, tensor shapes by name); ``read`` serves small vectors."""
    arch, form = find_gguf(metadata)
    file = GgufFile(metadata, shapes, read, form.names)
    config = form.config(file) | {"architectures": [arch.class_names[0]]}
    file.finish()
    spec = arch.spec(config)
    published = {name: file.published_name(name) for name in shapes if name not in file.consumed}
    held = _held(arch.layout, spec, published, shapes)
    orders = {}
    if form.interleaved:
        for part, n_heads in (("q", spec.heads.n_heads), ("k", spec.heads.n_kv_heads)):
            order = half_split_rows(n_heads, spec.heads.head_dim)
            for name in published:
                if re.fullmatch(rf"blk\.\d+\.attn_{part}\.(weight|bias)", name):
                    orders[name] = order
    stacks = _stacked(name for name in shapes if "_exps" in name)
    inexpressible = file.inexpressible or stacks
    return _matched(spec, config, held, shapes, {}, published, orders, inexpressible)


def _stacked(names: Iterator[str]) -> str | None:
    stack = next(names, None)
    return stack and f"{stack} holds all experts of a layer in one tensor"


def _held(
    layout: Layout, spec: DecoderSpec, published: Mapping[str, str], shapes: Shapes
) -> dict[str, Held]:
    parameters = expected(spec)
    paired = _paired_rows(spec) if layout.paired else {}
    held = {}
    for name, known_as in published.items():
        pieces, transposed = layout.pieces(known_as, shapes[name], parameters)
        ordered = tuple(
            Piece(piece.canonical, _within(piece.rows, paired[piece.canonical]))
            if piece.canonical in paired
            else piece
            for piece in pieces
        )
        held[name] = Held(ordered, transposed)
    return held


def _within(outer: Sequence[int] | None, order: list[int]) -> list[int]:
    return order if outer is None else [outer[row] for row in order]


def _paired_rows(spec: DecoderSpec) -> dict[str, list[int]]:
    """Row orders of queries and keys whose rotary pairs are neighbours."""
    rope = next((layer.rope for layer in spec.layers if layer.rope is not None), None)
    if rope is None:
        return {}
    first = rope.ropes[0] if isinstance(rope, RopeByLength) else rope
    orders = {}
    for part, n_heads in (("q", spec.heads.n_heads), ("k", spec.heads.n_kv_heads)):
        order = half_split_rows(n_heads, spec.heads.head_dim, 2 * len(first.inv_freq))
        for layer in range(len(spec.layers)):
            for kind in ("weight", "bias"):
                orders[layer_name(layer, f"self_attn.{part}_proj.{kind}")] = order
    return orders


def _matched(
    spec: DecoderSpec,
    config: Config,
    held: Mapping[str, Held],
    shapes: Shapes,
    unused: Mapping[str, str],
    published: Mapping[str, str],
    row_orders: Mapping[str, list[int]],
    inexpressible: str | None = None,
) -> Binding:
    parameters = expected(spec)
    filled = [piece.canonical for what in held.values() for piece in what.pieces]
    surplus = sorted(
        name
        for name, what in held.items()
        if any(piece.canonical not in parameters for piece in what.pieces)
    )
    twice = sorted(name for name, times in Counter(filled).items() if times > 1)
    wrong = [
        f"{name} is {tuple(shapes[name])}{_wanted(what, parameters)}"
        for name, what in held.items()
        if name not in surplus and not _fits(shapes[name], what, parameters)
    ]
    faults = [
        f"{label}: {_some(items)}"
        for label, items in (
            ("not used by this architecture", surplus),
            ("missing", sorted(parameters.keys() - set(filled))),
            ("there more than once", twice),
            ("of the wrong shape", wrong),
        )
        if items
    ]
    if faults:
        raise ModelFileError(
            f"the checkpoint does not match its config; tensors {'; '.join(faults)}",
            "the files are damaged, incomplete or of a variant llmrun does not know; "
            "`llmrun pull` fetches them again",
        )
    return Binding(spec, config, held, parameters, unused, published, row_orders, inexpressible)


def _fits(shape: Shape, held: Held, parameters: Mapping[str, Parameter]) -> bool:
    wanted = [parameters[piece.canonical].shape for piece in held.pieces]
    vector = len(wanted[0]) == 1
    if held.pieces[0].rows is None and tuple(shape) != wanted[0]:
        return False
    if not vector and (len(shape) < 2 or shape[-2 if held.transposed else -1] != wanted[0][-1]):
        return False
    total = n_rows(shape, vector=vector, transposed=held.transposed)
    covered = sum(total if piece.rows is None else len(piece.rows) for piece in held.pieces)
    each = all(
        piece.rows is None or len(piece.rows) == wanted[number][0]
        for number, piece in enumerate(held.pieces)
    )
    return covered == total and each


def _wanted(held: Held, parameters: Mapping[str, Parameter]) -> str:
    shapes = [parameters[piece.canonical].shape for piece in held.pieces]
    if len(shapes) == 1:
        return f", expected {shapes[0]}"
    rows_wanted = sum(shape[0] for shape in shapes)
    return f", expected {len(shapes)} parts with {rows_wanted} rows of {prod(shapes[0][1:])}"


def _some(items: list[str]) -> str:
    shown = ", ".join(items[:5])
    return shown if len(items) <= 5 else f"{shown} and {len(items) - 5} more"
