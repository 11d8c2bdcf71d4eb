"""Native memory: blocks that are given back with their owner, and an arena for weights."""

import ctypes
import weakref

from llmrun.errors import DoesNotFitError
from llmrun.kernels.cpu.library import library
from llmrun.kernels.host import HostArray

ALIGNMENT = 64
ARENA_BYTES = 64 << 20
"""Size of an arena's blocks. Pages that are never touched cost nothing."""


class Block:
    """Zeroed memory; pages cost memory only when they are touched. Freed with the object."""

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        lib = library()
        address = lib.llmr_alloc(max(nbytes, 1), int(huge))
        if not address:
            raise DoesNotFitError(
                f"{nbytes:,} bytes of memory could not be had", "use a smaller model or --ctx"
            )
        self.address: int = address
        self.nbytes = nbytes
        # Not at exit: a thread that nobody waits for may still compute with it.
        weakref.finalize(self, lib.llmr_free, address, max(nbytes, 1)).atexit = False

    def view(self, nbytes: int, offset: int = 0) -> memoryview:
        """Some bytes of it, writable; it keeps the block alive."""
        array = (ctypes.c_char * nbytes).from_address(self.address + offset)
        array.owner = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


class Arena:
    """Hands out pieces of large blocks, so that small weights share huge pages too."""

    def __init__(self, *, huge: bool) -> None:
        self._huge = huge
        self._blocks: list[Block] = []
        self._used = 0

    def take(self, nbytes: int) -> int:
        """Address of ``nbytes`` zero bytes that live as long as the arena."""
        if not self._blocks or self._used + nbytes > self._blocks[-1].nbytes:
            self._blocks.append(Block(max(nbytes, ARENA_BYTES), huge=self._huge))
            self._used = 0
        address = self._blocks[-1].address + self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return address


def address_of(array: HostArray) -> tuple[int, object]:
    """Address of an array's first byte, and what must stay alive while it is used."""
    data = array.data
    if data.readonly:
        copy = ctypes.create_string_buffer(bytes(data), data.nbytes)
        return ctypes.addressof(copy), copy
    whole = (ctypes.c_char * data.nbytes).from_buffer(data)
    return ctypes.addressof(whole), whole
