"""The coverage audit: what a model really weighs after quantizing or loading, role by role.

Counted from the arrays themselves, never from a scheme's name. If the weights in scope need over
10 % more bits than the scheme promises, the result is refused: a scheme that quietly left much of
a model at 16 bit is not the scheme that was asked for.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from llmrun.errors import UnavailableError
from llmrun.kernels.forms import Dense, Form, nbytes, parameters
from llmrun.kernels.host import DType
from llmrun.quant.recipe import Planned
from llmrun.quant.roles import QUANTIZED_ROLES, Role
from llmrun.quant.scheme import Scheme, find, fitting_group

ALLOWED_EXCESS = 1.10
"""Largest ratio of actual to requested bits over the weights in scope."""

_NAMED_OFFENDERS = 5


@dataclass(frozen=True)
class RoleCoverage:
    """Sums over the weights of one role."""

    tensors: int
    parameters: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        """Effective bits per weight, scales included."""
        return 8 * self.nbytes / self.parameters


@dataclass(frozen=True)
class Unquantized:
    """A matrix that is still dense, with the reason from the recipe."""

    name: str
    role: Role
    kind: str
    parameters: int
    reason: str


@dataclass(frozen=True)
class Coverage:
    """What was counted. ``roles``: in the order of Role, those that occur. ``kinds``: number of
    tensors by storage form. ``unquantized``: dense matrices (norms and biases are not listed).

    ``requested_bits``, ``actual_bits``: bits per weight over the quantized roles, as promised and
    as counted; 0 if there are none. ``partial``: over the limit, and allowed by the user.
    """

    roles: Mapping[Role, RoleCoverage]
    kinds: Mapping[str, int]
    unquantized: tuple[Unquantized, ...]
    requested_bits: float
    actual_bits: float
    partial: bool = False

    @property
    def total(self) -> RoleCoverage:
        """The whole model; its ``bits_per_weight`` is the honest figure for the model."""
        return RoleCoverage(
            sum(role.tensors for role in self.roles.values()),
            sum(role.parameters for role in self.roles.values()),
            sum(role.nbytes for role in self.roles.values()),
        )


@dataclass(frozen=True)
class _Entry:
    name: str
    role: Role
    kind: str
    dims: int
    parameters: int
    nbytes: int
    requested_bits: float
    reason: str

    @property
    def excess_bits(self) -> float:
        return 8 * self.nbytes - self.requested_bits


class CoverageBuilder:
    """Collects weights one at a time; keeps numbers only, no array stays alive.

    ``scheme``: what was asked for, None when a checkpoint is loaded as it is; a weight that its
    recipe gives another scheme is held against that one. Give each weight once: a tied head
    shares the embedding's entry.
    """

    def __init__(self, scheme: Scheme | None) -> None:
        self._scheme = scheme
        self._entries: list[_Entry] = []

    def add(self, name: str, role: Role, form: Form, planned: Planned, widening: int = 0) -> None:
        """Count one weight in the form it has now, and the bits by which a backend widens it."""
        wider = widening * parameters(form) // 8
        self._entries.append(
            _Entry(
                name,
                role,
                form.kind,
                len(form.shape),
                parameters(form),
                nbytes(form) + wider,
                _requested_bits(self._scheme, form, planned, wider),
                planned.reason,
            )
        )

    def expect(
        self, name: str, role: Role, shape: tuple[int, ...], kind: str, planned: Planned
    ) -> None:
        """Count one weight before it is made, dense as ``kind`` now."""
        dtype = DType[kind.upper()]
        promised = (
            0.0 if self._scheme is None else _promised_bits(self._scheme, shape, dtype, planned)
        )
        made = planned.scheme is not None
        bits = promised if made else prod(shape) * dtype.bits
        self._entries.append(
            _Entry(
                name,
                role,
                planned.scheme or kind,
                len(shape),
                prod(shape),
                int(bits) // 8,
                promised,
                planned.reason,
            )
        )

    def finish(self, *, allow_partial: bool = False) -> Coverage:
        """Sum up. UnavailableError naming the largest offenders if over the limit, unless
        ``allow_partial``: then the coverage says ``partial``."""
        in_scope = [entry for entry in self._entries if entry.role in QUANTIZED_ROLES]
        requested = sum(entry.requested_bits for entry in in_scope)
        actual = sum(8 * entry.nbytes for entry in in_scope)
        weights = sum(entry.parameters for entry in in_scope) or 1
        over = actual > ALLOWED_EXCESS * requested
        if over and not allow_partial:
            raise _too_large(in_scope, requested / weights, actual / weights)
        return Coverage(
            roles={
                role: _sum([entry for entry in self._entries if entry.role is role])
                for role in Role
                if any(entry.role is role for entry in self._entries)
            },
            kinds=dict(sorted(Counter(entry.kind for entry in self._entries).items())),
            unquantized=tuple(
                Unquantized(entry.name, entry.role, entry.kind, entry.parameters, entry.reason)
                for entry in self._entries
                if entry.dims >= 2 and entry.kind in ("bf16", "f16", "f32", "f64")
            ),
            requested_bits=requested / weights,
            actual_bits=actual / weights,
            partial=over,
        )


def _requested_bits(scheme: Scheme | None, form: Form, planned: Planned, wider: int) -> float:
    """Bits a weight may take: what its scheme promises for it, or what it has if it is kept.

    A dense weight that no group divides counts as if it were quantized: it is an offender.
    """
    kept = planned.scheme is None and not isinstance(form, Dense)
    if scheme is None or kept:
        return 8 * (nbytes(form) + wider)
    dtype = form.w.dtype if isinstance(form, Dense) else form.scales.dtype
    return _promised_bits(scheme, form.shape, dtype, planned)


def _promised_bits(scheme: Scheme, shape: tuple[int, ...], dtype: DType, planned: Planned) -> float:
    if planned.scheme is not None and planned.scheme != scheme.name:
        scheme = find(planned.scheme)
    k, count = shape[-1], prod(shape)
    if fitting_group(scheme.group, k) is None:
        k = -(-k // scheme.group) * scheme.group
    return scheme.bits_per_weight((count // shape[-1], k), dtype) * count


def _sum(entries: list[_Entry]) -> RoleCoverage:
    return RoleCoverage(
        len(entries),
        sum(entry.parameters for entry in entries),
        sum(entry.nbytes for entry in entries),
    )


def _too_large(in_scope: list[_Entry], requested: float, actual: float) -> UnavailableError:
    offenders = sorted(in_scope, key=lambda entry: -entry.excess_bits)
    offenders = [entry for entry in offenders if entry.excess_bits > 0]
    named = "; ".join(
        f"{entry.name} ({entry.kind}, {entry.reason})" for entry in offenders[:_NAMED_OFFENDERS]
    )
    more = len(offenders) - _NAMED_OFFENDERS
    return UnavailableError(
        f"the scheme asks for {requested:.2f} bits per weight, but this model would take "
        f"{actual:.2f}: {named}{f'; and {more} more' if more > 0 else ''}",
        "Choose a scheme with smaller groups (int4 or int8), or accept it with --allow-partial.",
    )
