"""Which backend serves a device, and why the others do not. Decided at load, never per token.

Backends are found, not listed: a module or folder of ``llmrun.kernels`` that exports ``BACKEND``
(``kernels.ops.BackendInfo``) counts. ``PREFERENCE`` orders them; its reasons are measured. Those
behind the one that is bound are not even imported.
"""

import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module

import llmrun.kernels as room
from llmrun.errors import UnavailableError
from llmrun.kernels.cuda import has_nvidia_driver
from llmrun.kernels.ops import OPS, WEIGHT_OPS, Backend, BackendInfo, CpuOptions

PREFERENCE = ("cpu", "gpu", "bnb_cuda", "reference")
"""Their modules, best first. One that is not named here comes last, in alphabetical order.

``cpu`` before ``gpu``: neither serves the other's device, and a run on the CPU need not import it.
``bnb_cuda`` before ``reference``: the same, but for 4-bit tables, which it need not dequantize.
``cpu`` before ``reference``: it starts without torch, whose import takes as long as everything else
together up to the first token, and its kernels read weights in their storage form.
"""

KINDS = ("bf16", "f16", "f32", "int4", "int8", "lut4")
"""Families of storage forms (first word of ``Form.kind``), for the table of ``doctor``."""


@dataclass(frozen=True)
class Candidate:
    """A backend asked about a device: usable if ``reason`` is None, else why not."""

    info: BackendInfo
    device: str
    reason: str | None


@dataclass(frozen=True)
class Row:
    """One line of the table: op, storage form family, the backend bound, others and why not."""

    op: str
    kind: str
    backend: str | None
    rejected: tuple[tuple[str, str], ...]


def backends() -> tuple[BackendInfo, ...]:
    """All backends, in order of preference. ValueError if two have one name."""
    found = tuple(_found())
    names = sorted(info.name for info in found)
    if len(set(names)) < len(names):
        raise ValueError(f"two backends have the same name: {names}")
    return found


def _found() -> Iterator[BackendInfo]:
    """Backends in order of preference, each imported only when it is asked for."""
    modules = sorted(module.name for module in pkgutil.iter_modules(room.__path__))
    known = [name for name in PREFERENCE if name in modules]
    for name in [*known, *(name for name in modules if name not in known)]:
        info = getattr(import_module(f"llmrun.kernels.{name}"), "BACKEND", None)
        if isinstance(info, BackendInfo):
            yield info


def candidates(device: str) -> tuple[Candidate, ...]:
    """Ask every backend about ``cpu``, ``cuda`` or ``cuda:N``."""
    return tuple(Candidate(info, device, info.available(device)) for info in backends())


def choose_device(wanted: str) -> str:
    """``auto`` gives ``cuda`` if a backend can use one, else ``cpu``; other values pass through.

    Without an NVIDIA driver nobody is asked: the answer of a backend may take seconds of imports.
    """
    if wanted != "auto":
        return wanted
    if not has_nvidia_driver():
        return "cpu"
    return "cpu" if problem("cuda") is not None else "cuda"


def problem(device: str) -> str | None:
    """Why no backend serves a device: each reason once, with the backends that gave it; None if
    one does."""
    names: dict[str, list[str]] = {}
    for info in _found():
        reason = info.available(device)
        if reason is None:
            return None
        names.setdefault(reason, []).append(info.name)
    common_first = sorted(names, key=lambda reason: -len(names[reason]))
    return "; ".join(f"{reason} ({', '.join(names[reason])})" for reason in common_first)


def bind(device: str, threads: int, options: CpuOptions | None = None) -> Backend:
    """Create the backend that serves a device. UnavailableError with every reason if none does."""
    for info in _found():
        if info.available(device) is None:
            return info.create(device, threads, options or CpuOptions())
    raise _unusable(device)


def check(device: str) -> None:
    """UnavailableError with every reason if no backend serves a device; nothing is made."""
    if problem(device) is not None:
        raise _unusable(device)


def _unusable(device: str) -> UnavailableError:
    return UnavailableError(
        f"device {device} cannot be used: {problem(device)}",
        "use --device cpu, or see `llmrun doctor` for what this machine offers",
    )


def table(device: str) -> Iterable[Row]:
    """What would be bound on a device, per op and family of storage forms."""
    asked = candidates(device)
    for op in OPS:
        for kind in KINDS if op in WEIGHT_OPS else ("-",):
            answers = [(c.info.name, c.reason or c.info.supports(op, kind)) for c in asked]
            bound = next((name for name, reason in answers if reason is None), None)
            rejected = tuple((name, reason) for name, reason in answers if reason is not None)
            yield Row(op, kind, bound, rejected)
