"""Quantizers by the native library (quantize.h). Nothing is imported but ctypes.

Rows of a large weight are shared among threads; a call lets go of Python's lock meanwhile.
"""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from llmrun.errors import DoesNotFitError, UnavailableError
from llmrun.kernels.cpu import abi
from llmrun.kernels.cpu.library import library
from llmrun.kernels.cpu.memory import address_of
from llmrun.kernels.cpu.topology import recommended_threads
from llmrun.kernels.host import DType, HostArray

_TYPES = {DType.F16: abi.F16, DType.BF16: abi.BF16, DType.F32: abi.F32}

INT4, INT4_ZERO, TABLE, INT8 = range(4)
"""Grids: what codes stand for (llmr_grid)."""

SHARED_FROM = 1 << 16
"""Weights from which rows are shared among threads."""

_ROWS = 64
"""A thread takes a multiple of so many rows, which the library works on together."""


class _Quantization(ctypes.Structure):
    """struct llmr_quantization."""

    _fields_ = (
        ("grid", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("ends", ctypes.c_int32),
        ("refits", ctypes.c_int32),
        ("n_blocks", ctypes.c_int32),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
    )


def int8(weights: HostArray, group: int, codes: HostArray, scales: HostArray) -> int | None:
    """Fill ``codes`` u8 [N, K] and ``scales`` [N, K/group] from ``weights`` [N, K].

    ``scales`` are of the weights' type; ``group``: 32, 64 or 128. Returns the flat index of the
    first weight that is not finite, None if all are. UnavailableError without the library.
    """
    function = library().llmr_quantize_int8
    memory = ctypes.c_void_p
    function.argtypes = (ctypes.c_int32, memory, ctypes.c_int64, ctypes.c_int32, memory, memory)
    function.restype = ctypes.c_int64
    addresses, alive = zip(*(address_of(a) for a in (weights, codes, scales)), strict=True)
    bad = function(
        _TYPES[weights.dtype], addresses[0], weights.size // group, group, *addresses[1:]
    )
    del alive
    return None if bad < 0 else int(bad)


def search(
    weights: HostArray,
    codes: HostArray,
    scales: HostArray,
    zeros: HostArray | None = None,
    *,
    grid: int,
    group: int,
    ends: int = 1,
    refits: int = 0,
    importance: HostArray | None = None,
    table: HostArray | None = None,
    factors: Sequence[HostArray] = (),
    threads: int | None = None,
    isa: str | None = None,
) -> int | None:
    """Fill ``codes``, ``scales`` and ``zeros`` from ``weights`` [N, K] by the search on a grid.

    ``ends`` of the grid that the extreme weight is tried on, 1 or 2; ``refits`` by least squares.
    ``importance``: F32 [K]. ``table``: F32 [16], ascending. ``factors``: F32 [B, B] for each block
    of columns in which errors are compensated. ``threads``: None for as many as are best here.
    Returns the flat index of the first weight that is not finite, None if all are.
    UnavailableError without the library or without the instruction set ``isa``.
    """
    function = library().llmr_quantize
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_char_p,
    )
    function.restype = ctypes.c_int64
    alive: list[object] = []

    def address(array: HostArray | None) -> int | None:
        if array is None:
            return None
        start, owner = address_of(array)
        alive.append(owner)
        return start

    n, k = weights.shape
    blocks = len(factors)
    widths = (ctypes.c_int64 * blocks)(*(factor.shape[0] for factor in factors))
    pointers = (ctypes.c_void_p * blocks)(*(address(factor) for factor in factors))
    what = _Quantization(
        grid=grid,
        type=_TYPES[weights.dtype],
        group=group,
        ends=ends,
        refits=refits,
        n_blocks=blocks,
        n=n,
        k=k,
        weights=address(weights),
        importance=address(importance),
        table=address(table),
        widths=ctypes.addressof(widths),
        factors=ctypes.addressof(pointers),
        codes=address(codes),
        scales=address(scales),
        zeros=address(zeros),
    )
    name = None if isa is None else isa.encode("ascii")

    def part(rows: tuple[int, int]) -> int:
        return int(function(ctypes.byref(what), *rows, name))

    return _first_bad([*_shared(part, n, weights.size, threads)])


def _shared(
    part: Callable[[tuple[int, int]], int], n: int, size: int, threads: int | None
) -> list[int]:
    if threads is None:
        threads = recommended_threads().count if size >= SHARED_FROM else 1
    step = -(-n // (threads * _ROWS)) * _ROWS
    borders = [*range(0, n, max(step, _ROWS)), n]
    parts = list(itertools.pairwise(borders))
    if len(parts) == 1:
        return [part(parts[0])]
    with ThreadPoolExecutor(len(parts), "quantize") as pool:
        return list(pool.map(part, parts))


def _first_bad(results: Sequence[int]) -> int | None:
    if -2 in results:
        raise DoesNotFitError(
            "memory to quantize with could not be had", "close other programs, then try again"
        )
    if -3 in results:
        raise UnavailableError("there is no such instruction set here", "choose another")
    return min((bad for bad in results if bad >= 0), default=None)
