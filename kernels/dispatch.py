"""Which backend serves a device, and why the others do not. Decided at load, never per token.

Backends are found, not listed: a module or folder of ``llmrun.kernels`` that exports ``BACKEND``
(``kernels.ops.BackendInfo``) counts. ``PREFERENCE`` orders them; its reasons are measured.
"""

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

import llmrun.kernels as room
from llmrun.errors import UnavailableError
from llmrun.kernels.ops import OPS, WEIGHT_OPS, Backend, BackendInfo

PREFERENCE = ("reference",)
"""Best first. A backend that is not named here comes last, in alphabetical order."""

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
    """All backends, in order of preference."""
    found: dict[str, BackendInfo] = {}
    for module in pkgutil.iter_modules(room.__path__):
        info = getattr(import_module(f"llmrun.kernels.{module.name}"), "BACKEND", None)
        if isinstance(info, BackendInfo):
            if info.name in found:
                raise ValueError(f"two backends are called {info.name!r}: {sorted(found)}")
            found[info.name] = info
    known = [name for name in PREFERENCE if name in found]
    return tuple(found[name] for name in [*known, *sorted(found.keys() - set(known))])


def candidates(device: str) -> tuple[Candidate, ...]:
    """Ask every backend about ``cpu``, ``cuda`` or ``cuda:N``."""
    return tuple(Candidate(info, device, info.available(device)) for info in backends())


def choose_device(wanted: str) -> str:
    """``auto`` gives ``cuda`` if a backend can use one, else ``cpu``; other values pass through."""
    if wanted != "auto":
        return wanted
    usable = any(candidate.reason is None for candidate in candidates("cuda"))
    return "cuda" if usable else "cpu"


def problem(device: str) -> str | None:
    """Why no backend serves a device, every reason by name; None if one does."""
    offers = candidates(device)
    if any(candidate.reason is None for candidate in offers):
        return None
    return "; ".join(f"{c.info.name}: {c.reason}" for c in offers)


def bind(device: str, threads: int) -> Backend:
    """Create the backend that serves a device. UnavailableError with every reason if none does."""
    for candidate in candidates(device):
        if candidate.reason is None:
            return candidate.info.create(device, threads)
    raise UnavailableError(
        f"device {device} cannot be used ({problem(device)})",
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
