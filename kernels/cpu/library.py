"""Finding and loading the native library, once per process.

It lies beside this package: in the same folder of a wheel, in site-packages of an editable install.
Where no compiler was found at installation there is none, and the reference backend takes over.
"""

import ctypes
import functools
import sys
import sysconfig
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

import llmrun.kernels.cpu as package
from llmrun.errors import UnavailableError
from llmrun.kernels.cpu.abi import (
    STRUCTURES,
    VERSION,
    PickRequest,
    PickResult,
    Source,
    Step,
    Weight,
)

ISAS = ("base", "avx2", "avxvnni", "avx512", "amx")
"""Names of the instruction sets the library may have kernels for (dispatch.cpp)."""

NEXT_STEP = (
    "install a C++ compiler and llmrun again (pip install --force-reinstall --no-deps llmrun-cli), "
    "or go on with the slower torch kernels"
)


def file_name() -> str:
    """Name of the library on this system."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    return f"{'' if sys.platform == 'win32' else 'lib'}llmrun_cpu{suffix}"


def path() -> Path | None:
    """Where the library is; None if it was not built."""
    folders = [Path(folder) for folder in package.__path__]
    folders += [
        Path(sysconfig.get_path(key), "llmrun", "kernels", "cpu") for key in ("platlib", "purelib")
    ]
    return next((f / file_name() for f in folders if (f / file_name()).is_file()), None)


def problem() -> str | None:
    """Why the library cannot be used, or None. Loads it."""
    try:
        library()
    except UnavailableError as error:
        return error.what
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library with its signatures. UnavailableError says why there is none."""
    found = path()
    if found is None:
        raise UnavailableError(
            "the native CPU library was not built (no working C++ compiler at installation)",
            NEXT_STEP,
        )
    try:
        lib = ctypes.CDLL(str(found))
        version = lib.llmr_abi_version()
    except (OSError, AttributeError) as error:
        raise UnavailableError(
            f"the native CPU library cannot be loaded: {error}", NEXT_STEP
        ) from error
    if version != VERSION:
        raise UnavailableError(
            f"the native CPU library has interface {version}, this package needs {VERSION}",
            "install llmrun again",
        )
    sizes = (c_int32 * len(STRUCTURES))()
    lib.llmr_abi_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(structure) for structure in STRUCTURES]
    _declare(lib)
    return lib


def usable_isas() -> list[str]:
    """Instruction sets that this machine can run, the plainest first."""
    usable = []
    for name in ISAS:
        context = library().llmr_create(1, name.encode("ascii"))
        if context:
            library().llmr_destroy(context)
            usable.append(name)
    return usable


def _declare(lib: ctypes.CDLL) -> None:
    context, memory = c_void_p, c_void_p
    signatures: dict[str, tuple[object, list[object]]] = {
        "llmr_isa": (c_char_p, []),
        "llmr_create": (context, [c_int32, c_char_p]),
        "llmr_destroy": (None, [context]),
        "llmr_context_isa": (c_char_p, [context]),
        "llmr_run": (c_int32, [context, memory, c_int32, POINTER(Step), c_int32]),
        "llmr_pack": (c_int32, [POINTER(POINTER(Weight)), POINTER(Source), c_int32, c_int32]),
        "llmr_pick": (c_int32, [context, memory, POINTER(PickRequest), POINTER(PickResult)]),
        "llmr_read": (c_int32, [context, memory, c_uint64]),
        "llmr_alloc": (memory, [c_uint64, c_int32]),
        "llmr_free": (None, [memory, c_uint64]),
        "llmr_widen": (None, [c_int32, memory, memory, c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
