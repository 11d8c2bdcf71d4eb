"""Instruction sets by cpuid and XCR0: none counts whose registers are not saved."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrun.kernels.cpu import library

V2, AVX2, AVXVNNI, AVX512, AMX = (1 << bit for bit in range(5))
EVERYTHING = V2 | AVX2 | AVXVNNI | AVX512 | AMX
EAX, EBX, ECX, EDX = range(4)

SSE, YMM, ZMM, TILES = 0b11, 0b111, 0xE7, 0x600E7
"""XCR0 (with the x87 bit, always set) of systems that save so much."""

# Every flag decode() looks at, by leaf, register and bit number (Intel's manual, volume 2, CPUID).
FLAGS = {
    "sse3": (1, ECX, 0),
    "ssse3": (1, ECX, 9),
    "fma": (1, ECX, 12),
    "cx16": (1, ECX, 13),
    "sse4_1": (1, ECX, 19),
    "sse4_2": (1, ECX, 20),
    "popcnt": (1, ECX, 23),
    "osxsave": (1, ECX, 27),
    "avx": (1, ECX, 28),
    "f16c": (1, ECX, 29),
    "avx2": (7, EBX, 5),
    "avx512f": (7, EBX, 16),
    "avx512dq": (7, EBX, 17),
    "avx512bw": (7, EBX, 30),
    "avx512vl": (7, EBX, 31),
    "avx512_vnni": (7, ECX, 11),
    "amx_tile": (7, EDX, 24),
    "amx_int8": (7, EDX, 25),
    "avx_vnni": (71, EAX, 4),
}
SSE_FLAGS = {"sse3", "ssse3", "cx16", "sse4_1", "sse4_2", "popcnt"}
AVX2_FLAGS = {"fma", "avx", "f16c", "avx2", "osxsave"}
AVX512_FLAGS = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"}
AMX_FLAGS = {"amx_tile", "amx_int8"}

Decode = Callable[[set[str], int], int]


@pytest.fixture(scope="module")
def native() -> ctypes.CDLL:
    """The library, opened once more: the signatures set here are no one else's."""
    reason = library.problem()
    if reason is not None:
        pytest.skip(f"no native library: {reason}")
    opened = ctypes.CDLL(library.library()._name)
    opened.llmr_features.restype = opened.llmr_decode_features.restype = ctypes.c_uint32
    return opened


@pytest.fixture(scope="module")
def decode(native: ctypes.CDLL) -> Decode:
    """Features of a processor with these flags under a system with this XCR0."""

    def ask(flags: set[str], xcr0: int) -> int:
        leaves = {leaf: (ctypes.c_uint32 * 4)() for leaf in (1, 7, 71)}
        for flag in flags:
            leaf, register, bit = FLAGS[flag]
            leaves[leaf][register] |= 1 << bit
        found: int = native.llmr_decode_features(*leaves.values(), ctypes.c_uint64(xcr0))
        return found

    return ask


@pytest.mark.parametrize(
    ("xcr0", "expected"),
    [
        (TILES, EVERYTHING),
        (ZMM, EVERYTHING - AMX),
        (YMM, V2 | AVX2 | AVXVNNI),
        (SSE, V2),
        (0, V2),
        (TILES & ~0x20, V2 | AVX2 | AVXVNNI),  # masks not saved
        (TILES & ~0x40, V2 | AVX2 | AVXVNNI),  # upper halves of zmm0..15 not saved
        (TILES & ~0x80, V2 | AVX2 | AVXVNNI),  # zmm16..31 not saved
        (TILES & ~0x04, V2),  # ymm not saved, whatever else is
        (TILES & ~0x20000, EVERYTHING - AMX),  # tile configuration not saved
        (TILES & ~0x40000, EVERYTHING - AMX),  # tile data not saved
    ],
)
def test_xcr0_masks_what_the_processor_has(decode: Decode, xcr0: int, expected: int) -> None:
    assert decode(set(FLAGS), xcr0) == expected


def test_without_osxsave_xcr0_means_nothing(decode: Decode) -> None:
    assert decode(set(FLAGS) - {"osxsave"}, TILES) == V2


@pytest.mark.parametrize("missing", sorted(FLAGS))
def test_every_flag_is_needed(decode: Decode, missing: str) -> None:
    found = decode(set(FLAGS) - {missing}, TILES)
    if missing in SSE_FLAGS:
        assert found == 0
    elif missing in AVX2_FLAGS:
        assert found == V2
    elif missing in AVX512_FLAGS:
        assert found == V2 | AVX2 | AVXVNNI
    elif missing in AMX_FLAGS:
        assert found == EVERYTHING - AMX
    else:
        assert found == EVERYTHING - AVXVNNI


def test_generations_of_processors(decode: Decode) -> None:
    nehalem = SSE_FLAGS
    haswell = nehalem | AVX2_FLAGS
    alder_lake = haswell | {"avx_vnni"}
    skylake_server = haswell | AVX512_FLAGS - {"avx512_vnni"}
    ice_lake_server = haswell | AVX512_FLAGS
    assert decode(set(), 0) == 0
    assert decode(nehalem, SSE) == V2
    assert decode(haswell, YMM) == V2 | AVX2
    assert decode(alder_lake, YMM) == V2 | AVX2 | AVXVNNI
    assert decode(skylake_server, ZMM) == V2 | AVX2
    assert decode(ice_lake_server, ZMM) == V2 | AVX2 | AVX512


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's list of flags")
def test_this_processor_as_linux_lists_it(native: ctypes.CDLL) -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    listed = {word for line in lines if line.startswith("flags") for word in line.split()[2:]}
    if not listed:
        pytest.skip("this system lists no flags: not an x86 processor")
    # Linux takes a flag off the list if it does not save the registers; it lists no osxsave.
    expected = {
        V2: {*SSE_FLAGS - {"sse3"}, "pni"},
        AVX2: AVX2_FLAGS - {"osxsave"},
        AVXVNNI: {"avx_vnni"},
        AVX512: AVX512_FLAGS,
        AMX: AMX_FLAGS,
    }
    found = native.llmr_features()
    assert {bit for bit in expected if found & bit} == {
        bit for bit, flags in expected.items() if flags <= listed
    }
