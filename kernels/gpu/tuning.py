"""Launches of the linears measured on this very card (``llmrun tune``).

A search goes from the rule's launch to better neighbours, one property at a time, and tries at
most ``MOST`` of them for each shape. ``tuned_file.py`` keeps what it finds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from llmrun.kernels.gpu import linear
from llmrun.kernels.gpu.arrays import SMALL, TILE_K, GpuWeight, Prepared, Workspace, padded
from llmrun.kernels.gpu.device import current
from llmrun.kernels.gpu.heuristics import Card, Launch, Shape, by_rule, card_of
from llmrun.kernels.gpu.timing import Call, per_call

MOST = 15
WORTH = 0.02
"""Less than this gain is noise: the rule's launch stays."""

TOLERANCE = 1e-3
"""Relative difference of two orders of summation in fp32, at most."""

_WARPS = (2, 4)
_STAGES = range(2, 7)
_MOST_SPLITS = 16
_MOST_BYTES = 1 << 30
"""Of weights that take turns."""

Weights = tuple[GpuWeight, ...]
Seconds = Callable[[Launch], float | None]
"""What a launch takes; None if it cannot run here."""

Timer = Callable[[Sequence[Call]], float]


@dataclass(frozen=True)
class Found:
    """The best launch of a shape: its seconds, those of the rule's, and how many were tried."""

    card: Card
    shape: Shape
    launch: Launch
    seconds: float
    rule_seconds: float
    tried: int

    @property
    def key(self) -> tuple[int, Shape]:
        """What it is found by."""
        return self.card.sm, self.shape


def search(card: Card, shape: Shape, seconds: Seconds) -> Found | None:
    """Look for a better launch than the rule's; None if not even that one runs."""
    rule = by_rule(card, shape)
    known: dict[Launch, float | None] = {rule: seconds(rule)}
    rule_seconds = known[rule]
    if rule_seconds is None:
        return None
    best, best_seconds = rule, rule_seconds
    for vary in (_splits, _warps, _stages, _splits):
        for launch in vary(best, shape):
            if launch in known or len(known) == MOST:
                continue
            taken = known[launch] = seconds(launch)
            if taken is not None and taken < best_seconds:
                best, best_seconds = launch, taken
    if best_seconds > (1 - WORTH) * rule_seconds:
        best, best_seconds = rule, rule_seconds
    return Found(card, shape, best, best_seconds, rule_seconds, len(known))


def _splits(launch: Launch, shape: Shape) -> Iterator[Launch]:
    most = min(_MOST_SPLITS, max(1, padded(shape.k, TILE_K) // TILE_K // 2))
    for splits in (launch.splits * 2, launch.splits // 2, launch.splits * 4):
        if 1 <= splits <= most:
            yield replace(launch, splits=splits)


def _warps(launch: Launch, shape: Shape) -> Iterator[Launch]:
    yield from (replace(launch, warps=warps) for warps in _WARPS)


def _stages(launch: Launch, shape: Shape) -> Iterator[Launch]:
    few, some, many = launch.stages
    for stages in sorted(_STAGES, key=lambda stages: abs(stages - few)):
        yield replace(launch, stages=(stages, some, many))  # steps of many rows keep the rule's


def groups(weights: Sequence[GpuWeight]) -> list[tuple[Weights, bool]]:
    """Weights that read the same inputs, as they are launched: neighbours of one form together.

    Two of one form are a gate and its up projection, side by side. Apart from those, a weight whose
    columns are not in order is launched by itself.
    """
    found: list[tuple[Weights, bool]] = []
    for _, alike in groupby(weights, _form):
        same = tuple(alike)
        pair = len(weights) == len(same) == 2
        if pair or same[0].columns is None:
            found.append((same, pair))
        else:
            found += [((weight,), False) for weight in same]
    return found


def _form(weight: GpuWeight) -> tuple[object, ...]:
    scales = None if weight.scales is None else weight.scales.dtype
    mins, in_order = weight.mins is not None, weight.columns is None
    return weight.form, weight.group, weight.codes.dtype, scales, mins, in_order


def shape_of(weights: Weights, pair: bool) -> Shape:
    """What the launch of these weights is chosen for; ``pair``: a gate beside its up projection."""
    first = weights[0]
    n = first.shape[0] if pair else sum(weight.shape[0] for weight in weights)
    return Shape(first.form, first.group, n, first.shape[1], pair)


def measured(launches: Sequence[tuple[Weights, bool]], timer: Timer = per_call) -> Iterator[Found]:
    """Search for each shape among a model's launches (weights, and whether they are a pair).

    Weights take turns, copied if need be, so that none is in the cache when it is read.
    """
    by_shape: dict[Shape, list[Weights]] = {}
    for weights, pair in launches:
        by_shape.setdefault(shape_of(weights, pair), []).append(weights)
    for shape, alike in by_shape.items():
        with current(alike[0][0].codes.device):  # the thread that loaded them is another one
            bench = _Bench(shape, _turns(alike), timer)
            found = search(bench.card, shape, bench.seconds)
        if found is not None:
            yield found


class _Bench:
    """One shape's weights, ready to be launched in any way."""

    def __init__(self, shape: Shape, turns: Sequence[Weights], timer: Timer) -> None:
        device = turns[0][0].codes.device
        self.card = card_of(device)
        self._shape, self._turns, self._timer = shape, turns, timer
        self._x = Prepared.empty(shape.k, device)
        random = torch.Generator().manual_seed(0)
        self._x.u[0, : shape.k] = torch.randn(shape.k, generator=random)
        self._y = torch.zeros(SMALL, shape.n, device=device)
        self._onto = Prepared.empty(shape.n, device)
        self._work = Workspace.empty(device)
        self._wanted: torch.Tensor | None = None

    def seconds(self, launch: Launch) -> float | None:
        """Of one launch; None if the card cannot run it, or what it computes is wrong."""
        try:
            self._call(self._turns[0], launch)
        except OutOfResources:  # of shared memory, mostly
            return None
        result = self._y[:1].clone()
        if self._wanted is None:
            self._wanted = result
        elif float((result - self._wanted).norm()) > TOLERANCE * float(self._wanted.norm()):
            return None
        return self._timer([self._bound(weights, launch) for weights in self._turns])

    def _bound(self, weights: Weights, launch: Launch) -> Call:
        return lambda: self._call(weights, launch)

    def _call(self, weights: Weights, launch: Launch) -> None:
        x, y, work = self._x, self._y, self._work
        tuned = {(self.card.sm, self._shape): launch}
        if self._shape.pair:
            gate, up = ((weight, None) for weight in weights)
            linear.gate_up(x, None, gate, up, "silu", y, self._onto, 1, work, tuned)
        else:
            linear.linears(x, None, [(weight, None) for weight in weights], y, 1, work, tuned)


def _turns(alike: list[Weights]) -> list[Weights]:
    """The weights and as many copies as it takes to fill the cache four times."""
    device = alike[0][0].codes.device
    if device.type != "cuda":
        return alike
    held = sum(weight.nbytes for weights in alike for weight in weights)
    wanted = min(4 * torch.cuda.get_device_properties(device).L2_cache_size, _MOST_BYTES)
    more = math.ceil(wanted / held) - 1
    copies = [tuple(copied(w) for w in weights) for _ in range(more) for weights in alike]
    return [*alike, *copies]


def copied(weight: GpuWeight) -> GpuWeight:
    """The same weight in other memory."""
    tensors: dict[str, Any] = {
        field.name: value.clone()
        for field in fields(weight)
        if isinstance(value := getattr(weight, field.name), torch.Tensor)
    }
    return replace(weight, **tensors)
