"""What is to be written: tensors by name and form, and the stored parts that each becomes.

Known from headers alone, before any weight exists. How a published format stores quantized
tensors is a ``Writing``; plain tensors are stored alike in all of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from llmrun.errors import InternalError
from llmrun.formats.safetensors_header import BITS
from llmrun.kernels.forms import ROW, Form
from llmrun.kernels.host import DType, HostArray

_KIND = re.compile(r"(int|lut)([48]) (?:g([1-9][0-9]{0,3})|row)(?: \+(min|zero))?")
_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+\..+")


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its logical name, the ``kind`` of its form, and its shape.

    Of a quantized one, what the kind does not tell: ``table``: ``nf4`` or ``fp4`` for a form with
    that table of bitsandbytes, empty for any other; ``nested``: its scales were quantized to 8
    bits each and are stored so; ``scale``: the dtype of its scales, None for the model's;
    ``columns``: the form says which input each column multiplies.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    table: str = ""
    nested: bool = False
    scale: DType | None = None
    columns: bool = False

    @property
    def module(self) -> str:
        """Name of the module a ``.weight`` belongs to."""
        return self.name.removesuffix(".weight")

    @property
    def is_plain(self) -> bool:
        """Whether it is stored as it is, as plain numbers."""
        return self.kind.upper() in DType.__members__

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a linear layer or an embedding."""
        return len(self.shape) == 2 and self.name.endswith(".weight")

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one of several experts."""
        return _EXPERT.fullmatch(self.name) is not None


@dataclass(frozen=True)
class Kind:
    """A quantized form's ``kind``, taken apart. ``shift``: ``min``, ``zero`` or nothing."""

    is_lookup: bool
    bits: int
    group: int
    shift: str


def parse_kind(kind: str) -> Kind | None:
    """Take a ``kind`` apart; None if no quantized form is called so."""
    match = _KIND.fullmatch(kind)
    if match is None:
        return None
    return Kind(match[1] == "lut", int(match[2]), int(match[3] or ROW), match[4] or "")


@dataclass(frozen=True)
class Part:
    """A stored tensor; ``begin`` counts from the start of the shard's data."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    begin: int = 0


def part(key: str, dtype: str, shape: tuple[int, ...]) -> Part:
    """Describe a stored tensor that has no place yet."""
    return Part(key, dtype, shape, prod(shape) * BITS[dtype] // 8)


@dataclass(frozen=True)
class Writing:
    """How one published format stores quantized tensors.

    ``holds``: whether it can hold all of these together. ``parts(tensor, model's dtype)``: what a
    tensor becomes. ``contents(form, tensor, model's dtype)``: the bytes of each part by its key.
    ``config(all tensors, model's dtype)``: the ``quantization_config``. ``readers``: programs that
    load the result.
    """

    name: str
    readers: tuple[str, ...]
    holds: Callable[[Sequence[Planned]], bool]
    parts: Callable[[Planned, DType], tuple[Part, ...]]
    contents: Callable[[Form, Planned, DType], Mapping[str, memoryview]]
    config: Callable[[Sequence[Planned], DType], Mapping[str, object]]


def linears(planned: Sequence[Planned]) -> list[str]:
    """Modules that other engines take for linear layers and that are stored plain."""
    return [
        tensor.module
        for tensor in planned
        if tensor.is_matrix and tensor.is_plain and "embed" not in tensor.module
    ]


def of_type(array: HostArray, dtype: DType, key: str) -> memoryview:
    """Return an array's bytes; InternalError if it was planned as another type.

    Sizes agree between bf16 and f16, so only this tells one from the other.
    """
    if array.dtype is not dtype:
        raise InternalError(f"{key} was planned as {dtype.name}, it is {array.dtype.name}.")
    return array.data
