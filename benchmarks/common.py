"""What the reports of all benchmarks share: the machine's description and aligned tables."""

import datetime
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from work import Facts, compiler

import llmrun
from llmrun.errors import UnavailableError
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.library import path as library_path
from llmrun.measure.environment import environment

SETS = ("base", "avx2", "avxvnni", "avx512", "amx")
"""Instruction sets of the CPU kernels, the best last."""


@dataclass(frozen=True)
class Spread:
    """Samples of one quantity: their median between the least and the most."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        digits = 2 if self.median < 10 else 1 if self.median < 100 else 0
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}-{self.most:.{digits}f})"


def spread(samples: Sequence[float]) -> Spread:
    """Describe the samples, at least one."""
    return Spread(median(samples), min(samples), max(samples))


def machine() -> Facts:
    """The machine, the moment and the command line, as a report names them."""
    library = library_path()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        **environment({"llmrun": llmrun.__version__}),
        "compiler": compiler(library) if library else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_before": load,
        "command": shlex.join(["python", *sys.argv]),
    }


def usable(names: Sequence[str], threads: int) -> dict[str, CpuBackend]:
    """A backend for each of these sets; others are said. SystemExit if none can be used."""
    found = {}
    for name in names:
        try:
            found[name] = CpuBackend(threads, isa=name)
        except UnavailableError as error:
            print(f"{name}: {error.what}")
    if not found:
        raise SystemExit("none of these instruction sets can be used here")
    return found


def show_facts(facts: Mapping[str, object]) -> None:
    """Print what is known, a line each."""
    for name, value in facts.items():
        if value is not None:
            print(f"{name}: {value}")


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as they need to be."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
