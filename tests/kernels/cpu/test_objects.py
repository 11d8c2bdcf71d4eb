"""The built library: what it links, exports and executes, instruction by instruction.

Files are compiled for instruction sets of their own. Code for a newer processor must not slip into
a file that runs on older ones, neither by a flag nor as the linker's choice among equal inline
functions; it would end there with an illegal instruction.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.kernels.cpu import library

ROOT = Path(__file__).resolve().parents[3]
EVEX, VEX = {"62"}, {"c4", "c5"}
"""First bytes, in 64-bit code, of AVX512's encoding and of AVX's (masks and tiles use it too)."""


def run(*command: str) -> str:
    """What a tool of binutils prints. Skips without it."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} (binutils) is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def built() -> str:
    """The file of the library."""
    reason = library.problem()
    if reason is not None:
        pytest.skip(f"no native library: {reason}")
    path: str = library.library()._name
    if "ELF" not in run("readelf", "-h", path):
        pytest.skip("not an ELF file")
    return path


@pytest.fixture(scope="module")
def objects(built: str) -> list[Path]:
    """The object files of the newest build in this checkout; its folder outlives the install."""
    folders = list((ROOT / "build").glob("*/CMakeFiles/llmrun_cpu.dir"))
    if not folders:
        pytest.skip("no object files: the library was not built in this checkout")
    newest = max(folders, key=lambda folder: (folder.parents[1] / "CMakeCache.txt").stat().st_mtime)
    sources = ROOT / "kernels/cpu"  # objects of sources that are gone stay behind
    found = [path for path in sorted(newest.rglob("*.o")) if (sources / path.stem).is_file()]
    assert found
    if "x86-64" not in run("objdump", "-f", str(found[0])):
        pytest.skip("not x86-64")
    return found


def instructions(path: Path | str) -> Iterator[tuple[str, str]]:
    """First byte of the encoding and text of every instruction."""
    for line in run("objdump", "-d", "-w", str(path)).splitlines():
        _, *rest = line.split("\t")
        if len(rest) == 2:
            yield rest[0].split()[0], rest[1]


def newer_than(path: Path) -> list[str]:
    """Instructions newer than the set a file is named after (none: the base)."""
    name = path.name
    if "avx512" in name or "amx" in name:
        return []
    if "avx2" in name or "avxvnni" in name:
        vnni = "avxvnni" in name
        return [
            text
            for byte, text in instructions(path)
            if byte in EVEX
            or (byte in VEX and re.match(r"k[a-z]|t(ile|dp)", text))
            or (not vnni and "vpdp" in text)
        ]
    return [text for byte, text in instructions(path) if byte in EVEX | VEX]


def test_no_instruction_newer_than_its_file(objects: list[Path]) -> None:
    assert {path.name: newer for path in objects if (newer := newer_than(path))} == {}


@pytest.mark.parametrize(
    ("newer", "older"),
    [("avx512", "base"), ("avx512", "avx2"), ("avx512", "avxvnni"), ("avx2", "base")],
)
def test_the_check_sees_newer_instructions(
    objects: list[Path], tmp_path: Path, newer: str, older: str
) -> None:
    path = next(path for path in objects if newer in path.name)
    assert newer_than(Path(shutil.copy(path, tmp_path / f"{older}.o")))


def test_the_linker_has_no_choice_among_equal_functions(objects: list[Path]) -> None:
    # A weak function exists once in the library, in the code of any of the files that had it.
    isa = [path for path in objects if re.search("avx|amx", path.name)]
    symbols = {path.name: run("nm", "-C", "--defined-only", str(path)) for path in isa}
    weak = {name: re.findall(r"^\S+ [uVvWw] (.*)$", text, re.M) for name, text in symbols.items()}
    assert {name: found for name, found in weak.items() if found} == {}


def test_it_needs_the_system_only(built: str) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", "-W", built))
    assert needed
    system = re.compile(r"(libc|libm|libpthread|libdl|librt|ld-linux.*)\.so[.\d]*")
    assert [name for name in needed if not system.fullmatch(name)] == []


def test_its_stack_is_not_executable(built: str) -> None:
    (line,) = re.findall(r"^\s*GNU_STACK.*$", run("readelf", "-l", "-W", built), re.M)
    assert "RWE" not in line


def test_it_exports_its_interface_only(built: str) -> None:
    exported = re.findall(r"^\S+ \w (\S+)$", run("nm", "-D", "--defined-only", built), re.M)
    assert exported
    assert [name for name in exported if not name.startswith("llmr_")] == []
