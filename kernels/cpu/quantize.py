"""Quantizers by the native library (quantize.h). Nothing is imported but ctypes."""

import ctypes

from llmrun.kernels.cpu import abi
from llmrun.kernels.cpu.library import library
from llmrun.kernels.cpu.memory import address_of
from llmrun.kernels.host import DType, HostArray

_TYPES = {DType.F16: abi.F16, DType.BF16: abi.BF16, DType.F32: abi.F32}


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
