"""What GGUF files hold in bulk, by the native library (gguf.h): blocks and strings.

``unpack`` works on one thread and lets go of Python's lock meanwhile, so a caller may give rows of
one weight to several threads. Nothing is imported but ctypes.
"""

import ctypes

from llmrun.kernels.cpu.library import library
from llmrun.kernels.host import DType, HostArray

_ARGUMENTS = (
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int32,
)


def unpack(
    type_number: int,
    blocks: HostArray,
    n_blocks: int,
    codes: HostArray,
    scales: HostArray,
    mins: HostArray | None,
) -> int:
    """Fill ``codes`` and ``scales`` (and ``mins``) from ``n_blocks`` blocks of GGUF's type number.

    Arrays as ``GroupInt`` and ``Lut16`` describe them, scales and mins of the same type: F16
    (MXFP4: BF16), or F32 (Q*_K and IQ4_XS only). Their sizes must fit; they are not looked at
    here. Returns how many scales and minima are not finite. UnavailableError without the library;
    ValueError for a type that it does not unpack.
    """
    function = library().llmr_unpack_gguf
    function.argtypes, function.restype = _ARGUMENTS, ctypes.c_int64
    exact = scales.dtype is DType.F32
    arrays = (codes, scales, mins)
    bad = function(
        type_number, _address(blocks), n_blocks, *(a and _address(a) for a in arrays), exact
    )
    if bad < 0:
        raise ValueError(f"GGUF type {type_number} is not unpacked natively")
    return int(bad)


def skip_strings(data: memoryview, count: int, most: int) -> int | None:
    """Bytes that an array of ``count`` strings takes, with which ``data`` begins.

    None if a string is longer than ``most`` bytes or goes beyond the data. UnavailableError without
    the library.
    """
    function, size = library().llmr_skip_strings, ctypes.c_int64
    function.argtypes, function.restype = (ctypes.c_void_p, size, size, ctypes.c_uint64), size
    strings = ctypes.addressof(ctypes.c_char.from_buffer(data))
    taken = function(strings, data.nbytes, count, most)
    return None if taken < 0 else int(taken)


def joined_strings(data: memoryview, count: int) -> bytes | None:
    """The ``count`` strings of an array that begins with ``data``, a zero byte behind each.

    None if one of them holds a zero byte itself or they go beyond the data. UnavailableError
    without the library.
    """
    function = library().llmr_join_strings
    memory, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = (memory, size, size, memory), size
    strings = ctypes.addressof(ctypes.c_char.from_buffer(data))
    n_bytes = function(strings, data.nbytes, count, None)
    if n_bytes < 0:
        return None
    out = bytearray(n_bytes)
    function(strings, data.nbytes, count, (ctypes.c_char * n_bytes).from_buffer(out))
    return bytes(out)


def _address(array: HostArray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
