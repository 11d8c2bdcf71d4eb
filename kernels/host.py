"""Arrays as files hold them: a dtype, a shape and bytes. A leaf without dependencies.

``store, formats, text, model, engine, measure`` and ``cli`` pass these on and never compute with
them; a backend turns one into its own array (architecture: "Arrays are opaque").
"""

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class DType(Enum):
    """Element types, named as in the safetensors format; the value is the width in bits."""

    F64 = ("F64", 64)
    F32 = ("F32", 32)
    F16 = ("F16", 16)
    BF16 = ("BF16", 16)
    I64 = ("I64", 64)
    I32 = ("I32", 32)
    I16 = ("I16", 16)
    I8 = ("I8", 8)
    U8 = ("U8", 8)
    BOOL = ("BOOL", 8)

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return self.value[1]


@dataclass(frozen=True, eq=False)
class HostArray:
    """A contiguous row-major array in host memory (little-endian).

    ``data`` is a flat byte view of exactly ``nbytes`` bytes. It is writable even for files, which
    are mapped copy-on-write, but nobody writes into an array that another owner made.
    """

    dtype: DType
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.data.nbytes != self.nbytes:
            raise ValueError(
                f"{self.dtype.name} {self.shape} needs {self.nbytes} bytes, not {self.data.nbytes}"
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.bits // 8


class LaterArray(HostArray):
    """An array whose bytes are made when they are first looked at; nobody may need them at all."""

    def __init__(
        self, dtype: DType, shape: tuple[int, ...], make: Callable[[], memoryview]
    ) -> None:
        # The parent is frozen, and its own __init__ wants the bytes.
        self.__dict__.update(dtype=dtype, shape=shape, _make=make)

    @cached_property
    def data(self) -> memoryview:
        """The bytes."""
        data: memoryview = self.__dict__["_make"]()
        return data


LARGE_BYTES = 1 << 20
"""From here on memory is mapped: the system hands out zeros, and nobody writes them twice."""


def empty(dtype: DType, shape: tuple[int, ...]) -> HostArray:
    """Return a zero-filled array that owns its memory."""
    nbytes = math.prod(shape) * dtype.bits // 8
    if nbytes < LARGE_BYTES:
        return HostArray(dtype, shape, memoryview(bytearray(nbytes)))
    return HostArray(dtype, shape, memoryview(mmap.mmap(-1, nbytes)))
