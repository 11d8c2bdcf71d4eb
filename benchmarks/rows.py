"""The rows of the comparison: who competes with which files, in what work."""

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmrun.cli.fetching import fetch_model
from llmrun.cli.settings import read_settings
from llmrun.store.progress import SilentProgress

HERE = Path(__file__).parent
SETTLE_S = 2.5
"""llmrun works with fewer threads for up to 2 s after it met a neighbour on its cores."""

OURS, THEIRS = "peer_llmrun.py", "peer_llamacpp.py"


@dataclass(frozen=True)
class Size:
    """Tokens of a prefill and of a decode."""

    prefill: int
    decode: int


FULL, QUICK = Size(512, 128), Size(256, 32)


@dataclass(frozen=True)
class Contender:
    """One engine with one model; ``script`` serves it, ``extra`` are further arguments."""

    name: str
    script: str
    model: Path
    extra: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether this is llmrun."""
        return self.script == OURS


@dataclass(frozen=True)
class Job:
    """Work to time; ``request`` as in ``work.serve``, ``hogs`` busy processes beside it.

    ``settle_s``: a pause before it, for an engine that remembers what came before.
    """

    name: str
    request: dict[str, str | int]
    hogs: int = 0
    settle_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together."""
        return int(self.request["tokens"]) * int(self.request.get("sequences", 1))


@dataclass(frozen=True)
class Derived:
    """Each engine's speed in its second job over that in its first, divided by ``share``."""

    title: str
    share: float = 1.0


@dataclass(frozen=True)
class Row:
    """One contest. ``capacity`` is the context of each of the ``sequences``."""

    name: str
    title: str
    contenders: tuple[Contender, ...]
    jobs: tuple[Job, ...]
    capacity: int
    sequences: int = 1
    derived: Derived | None = field(default=None)


@dataclass(frozen=True)
class Models:
    """Files, and how to make more of them. ``work`` is a folder for what llama.cpp requantizes."""

    starter: str
    second: Path | None
    int4: Path | None
    peer_python: str
    work: Path
    threads: int

    def starter_file(self) -> Path:
        """The starter's file, fetched if it is not here."""
        return fetch_model(self.starter, read_settings(os.environ), SilentProgress()).path

    def requantized(self, source: Path, kind: str) -> Path:
        """A file in llama.cpp's ``kind``, made by its own quantizer unless it is there.

        If that fails there is none, and who competes with it will say so.
        """
        out = self.work / f"{source.stem}-{kind}.gguf"
        if not out.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            part = out.with_suffix(".part")
            script = [self.peer_python, str(HERE / THEIRS)]
            more = ["--threads", str(self.threads), "--requantize", kind, str(part)]
            if subprocess.run([*script, str(source), *more], check=False).returncode == 0:
                part.replace(out)
        return out


def rows(names: Sequence[str], models: Models, *, quick: bool) -> Iterator[Row]:
    """The rows asked for, one at a time; files are made when their row comes."""
    for name in names:
        if ROWS[name] in (_second, _int4) and models.second is None:
            print(f"\n{name}: left out, it needs --model")
        else:
            yield ROWS[name](models, QUICK if quick else FULL)


def fair_share(cores: int, threads: int, hogs: int) -> float:
    """The part of its undisturbed speed an engine is due beside ``hogs`` busy processes.

    A fair scheduler gives each of ``threads + hogs`` the same time of ``cores``, at most one core
    each: ``min(1, cores / (threads + hogs))`` per thread. Undisturbed it is
    ``min(1, cores / threads)``. With 2 cores, 2 threads and 1 hog that is 2/3.
    """
    return min(1.0, cores / (threads + hogs)) / min(1.0, cores / threads)


def _prefill(tokens: int) -> Job:
    return Job(f"prefill {tokens}", {"work": "prefill", "tokens": tokens})


def _decode(tokens: int, depth: int = 0, sequences: int = 1, hogs: int = 0) -> Job:
    name = f"decode {tokens}"
    name += f" behind {depth}" if depth else ""
    name += f", {sequences} sequences" if sequences > 1 else ""
    name += f", beside {hogs} busy process" if hogs else ""
    request: dict[str, str | int] = {"work": "decode", "tokens": tokens}
    return Job(name, request | {"depth": depth, "sequences": sequences}, hogs)


def _starter(models: Models, size: Size) -> Row:
    path = models.starter_file()
    contenders = (
        Contender("as stored", OURS, path),
        Contender("same file", THEIRS, path),
        Contender("its Q4_0", THEIRS, models.requantized(path, "Q4_0")),
    )
    return Row(
        "starter", path.name, contenders, (_prefill(size.prefill), _decode(size.decode)), 1024
    )


def _second(models: Models, size: Size) -> Row:
    assert models.second is not None
    contenders = (
        Contender("as stored", OURS, models.second),
        Contender("same file", THEIRS, models.second),
    )
    jobs = (_prefill(size.prefill), _decode(size.decode))
    return Row("second", f"{models.second.name}, the same file", contenders, jobs, 1024)


def _int4(models: Models, size: Size) -> Row:
    assert models.second is not None
    if models.int4 is None:
        made = ("--quant", "int4", "--requantize")
        ours = Contender("int4 made from the file", OURS, models.second, made)
    else:
        ours = Contender("int4", OURS, models.int4)
    contenders = (ours, Contender("Q4_K_M", THEIRS, models.second))
    jobs = (_prefill(size.prefill), _decode(size.decode))
    return Row("int4", f"{models.second.name} against int4 of it", contenders, jobs, 1024)


def _int8(models: Models, size: Size) -> Row:
    path = models.starter_file()
    contenders = (
        Contender("int8, groups of 128", OURS, path, ("--quant", "int8", "--requantize")),
        Contender("its Q8_0", THEIRS, models.requantized(path, "Q8_0")),
    )
    jobs = (_prefill(size.prefill), _decode(size.decode))
    return Row("int8", f"8 bits, both made of {path.name}", contenders, jobs, 1024)


def _iq4(models: Models, size: Size) -> Row:
    path = models.requantized(models.starter_file(), "IQ4_NL")
    contenders = (Contender("as stored", OURS, path), Contender("same file", THEIRS, path))
    jobs = (_prefill(size.prefill), _decode(size.decode))
    return Row("iq4", f"a table of integers, {path.name}", contenders, jobs, 1024)


def _depth(models: Models, size: Size) -> Row:
    jobs = (_decode(size.decode, depth=4096),)
    return Row("depth", "a long context", _same_file(models), jobs, 4096 + 1024)


def _batch(models: Models, size: Size) -> Row:
    jobs = (_decode(size.decode), _decode(size.decode, sequences=4))
    gain = Derived("4 sequences over 1")
    return Row("batch", "sequences together", _same_file(models), jobs, 1024, 4, gain)


def _noise(models: Models, size: Size) -> Row:
    undisturbed = replace(_decode(size.decode), settle_s=SETTLE_S)
    jobs = (undisturbed, _decode(size.decode, hogs=1))
    share = fair_share(len(os.sched_getaffinity(0)), models.threads, hogs=1)
    derived = Derived(f"speed over its fair share ({share:.2f} of undisturbed)", share)
    return Row("noise", "a busy neighbour", _same_file(models), jobs, 1024, derived=derived)


def _same_file(models: Models) -> tuple[Contender, ...]:
    path = models.starter_file()
    return Contender("as stored", OURS, path), Contender("same file", THEIRS, path)


ROWS: dict[str, Callable[[Models, Size], Row]] = {
    "starter": _starter,
    "second": _second,
    "int4": _int4,
    "int8": _int8,
    "iq4": _iq4,
    "depth": _depth,
    "batch": _batch,
    "noise": _noise,
}
"""Rows by name, in the order they run; each is made from the files and the size of the work."""
