"""The search of ``quant.search`` in plain torch: its definition, used where there is no library."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.kernels.host import HostArray
from llmrun.quant.blocks import blocks_of_groups, working_blocks
from llmrun.quant.compensation import NOTHING, Prepared
from llmrun.quant.search import FACTORS, Effort, Grid, Searched, effort, expect_width, results
from llmrun.quant.weighting import lane_sum

if TYPE_CHECKING:
    import torch

_UNREACHABLE = 2.0**64
"""Stands for a scale that is zero or infinite in the weights' type: every code becomes 0."""


@dataclass(frozen=True, eq=False)
class _Task:
    """What is the same for all groups; ``entries``: fp32 [16] of a table."""

    grid: Grid
    group: int
    effort: Effort
    dtype: "torch.dtype"
    entries: "torch.Tensor | None"


def search(
    host: HostArray,
    grid: Grid,
    group: int,
    inputs: Prepared = NOTHING,
    table: HostArray | None = None,
    block_weights: int | None = None,
) -> Searched:
    """As ``quant.search.search``; ``block_weights`` at a time, which changes no byte."""
    from llmrun.kernels.reference.arrays import TORCH_DTYPES, as_tensor

    expect_width(inputs, host.shape[1], group)
    found = results(host, grid, group)
    writer = _Writer(found, grid, group)
    entries = None if table is None else as_tensor(table)
    task = _Task(grid, group, effort(grid, inputs), TORCH_DTYPES[host.dtype], entries)
    with working_blocks() as preferred_weights:
        blocks = blocks_of_groups(host, group, block_weights or preferred_weights)
        if inputs.factors:
            for _ in blocks:
                pass  # refuses weights that are not finite
            _compensate(host, task, inputs, writer)
            return found
        for start, block in blocks:
            weights = block.t().float()  # [group, B]: a group is a column
            places = range(start, start + weights.shape[1])
            scale, zero = _best_scales(task, weights, _columns(inputs, group, places))
            codes = _codes(task, _nearest(task, weights, scale, zero), zero)
            writer.write(places, codes, scale, zero)
    return found


def _columns(inputs: Prepared, group: int, places: range) -> "torch.Tensor | None":
    """Importance [group, B] of the columns of some groups, which count along rows, then down."""
    import torch

    from llmrun.kernels.reference.arrays import as_tensor

    if inputs.importance is None:
        return None
    columns = as_tensor(inputs.importance).view(-1, group)
    return columns[torch.arange(places.start, places.stop) % columns.shape[0]].t()


def _compensate(host: HostArray, task: _Task, inputs: Prepared, writer: "_Writer") -> None:
    """Group after group, column after column; each error is made good before the next one."""
    from llmrun.kernels.reference.arrays import as_tensor

    stored, group = as_tensor(host), task.group
    n, k = host.shape
    begin = 0
    for factor in (as_tensor(factor) for factor in inputs.factors):
        width = factor.shape[0]
        weights = stored[:, begin : begin + width].t().float().contiguous()  # [width, N]
        for first in range(0, width, group):
            own = weights[first : first + group]
            place = (begin + first) // group
            columns = _columns(inputs, group, range(place, place + 1))
            scale, zero = _best_scales(task, own, columns)
            levels = own.clone()
            for j in range(group):
                levels[j] = _nearest(task, own[j], scale, zero)
                error = own[j] - levels[j] * scale
                later = slice(first + j + 1, width)
                weights[later] -= factor[first + j, later].unsqueeze(1) * error
            places = range(place, n * (k // group), k // group)
            writer.write(places, _codes(task, levels, zero), scale, zero)
        begin += width


def _best_scales(
    task: _Task, weights: "torch.Tensor", columns: "torch.Tensor | None"
) -> tuple["torch.Tensor", "torch.Tensor | None"]:
    """Return fp32 scales [B] as the weights' type holds them, and zero points for INT4_ZERO.

    Weights and scales are first brought near 1 by a power of two per group. That is exact and
    changes no choice, but keeps squares from vanishing below 1e-19 or overflowing above 1e19.
    """
    import torch

    magnitude = weights.abs().amax(dim=0)
    if task.grid is Grid.INT8:
        return _held(task, magnitude / 127, torch.ones_like(magnitude))[0], None
    _, exponent = torch.frexp(magnitude)
    # 2^-exponent by its bits: no library's pow has to be exact for it.
    power = ((127 - exponent.clamp_(-126, 126)) << 23).view(torch.float32)
    near = weights * power
    importance = torch.ones_like(near) if columns is None else columns
    least = torch.full_like(magnitude, torch.inf)
    best, zero = torch.ones_like(magnitude), torch.zeros_like(magnitude)

    def attempt(stored: "torch.Tensor", scale: "torch.Tensor", at: "torch.Tensor") -> None:
        off = near - _nearest(task, near, scale, at) * scale
        error = lane_sum(off.mul_(off).mul_(importance))
        better = error < least
        for kept, new in ((least, error), (best, stored), (zero, at)):
            kept.copy_(torch.where(better, new, kept))

    for start in _starts(task, weights):
        for factor in torch.tensor(FACTORS):
            stored, scale = _held(task, start * factor, power)
            for at in _zero_points(task, weights, power, scale):
                attempt(stored, scale, at)
    for _ in range(task.effort.refits):
        values = _nearest(task, near, best * power, zero)
        weighted = values * importance
        fitted = lane_sum(weighted * near) / lane_sum(weighted * values)
        attempt(*_held(task, fitted / power, power), zero)
    return best, zero if task.grid is Grid.INT4_ZERO else None


def _starts(task: _Task, weights: "torch.Tensor") -> "Iterator[torch.Tensor]":
    """The scales that use the whole grid."""
    if task.grid is Grid.INT4_ZERO:
        low, high = _range(weights)
        yield high / 15 - low / 15
        return
    position = weights.abs().max(dim=0)[1]  # the first of equals
    extreme = weights.gather(0, position.unsqueeze(0)).squeeze(0)
    ends = (-8, 7) if task.entries is None else (task.entries[0], task.entries[-1])
    for end in ends[: task.effort.ends]:
        yield extreme / end


def _zero_points(
    task: _Task, weights: "torch.Tensor", power: "torch.Tensor", scale: "torch.Tensor"
) -> "list[torch.Tensor]":
    import torch

    if task.grid is not Grid.INT4_ZERO:
        return [torch.zeros_like(scale)]
    low, high = _range(weights)
    floor = (7.5 - (0.5 * high * power + 0.5 * low * power) / scale).floor_()
    return [floor.clamp(0, 15), (floor + 1).clamp(0, 15)]


def _range(weights: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
    return weights.amin(dim=0).clamp(max=0), weights.amax(dim=0).clamp(min=0)


def _held(
    task: _Task, scale: "torch.Tensor", power: "torch.Tensor"
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Return a scale as the weights' type holds it, and the same beside weights near 1.

    One that is zero or infinite there becomes 1, and is judged as if all codes were 0.
    """
    import torch

    stored = scale.to(task.dtype).float()
    usable = (stored != 0) & stored.isfinite()
    return torch.where(usable, stored, 1), torch.where(usable, stored * power, _UNREACHABLE)


def _nearest(
    task: _Task, weights: "torch.Tensor", scale: "torch.Tensor", zero: "torch.Tensor | None"
) -> "torch.Tensor":
    """Return the nearest values of the grid, before the scale."""
    import torch

    levels = weights / scale
    if task.entries is not None:
        middles = (task.entries[:-1] + task.entries[1:]) / 2
        return task.entries[torch.bucketize(levels.contiguous(), middles)]
    if task.grid is Grid.INT4_ZERO and zero is not None:
        return torch.minimum(torch.maximum(levels, -zero), 15 - zero).round_()
    low, high = (-127, 127) if task.grid is Grid.INT8 else (-8, 7)
    return levels.clamp_(low, high).round_()


def _codes(task: _Task, levels: "torch.Tensor", zero: "torch.Tensor | None") -> "torch.Tensor":
    import torch

    if task.entries is not None:
        return torch.bucketize(levels.contiguous(), task.entries).to(torch.uint8)
    if zero is not None:
        return (levels + zero).to(torch.uint8)
    return (levels + (128 if task.grid is Grid.INT8 else 8)).to(torch.uint8)


class _Writer:
    """Puts groups where they belong; a group's place counts along rows, then down."""

    def __init__(self, found: Searched, grid: Grid, group: int) -> None:
        from llmrun.kernels.reference.arrays import as_tensor

        self._packed = grid.bits == 4
        self._codes = as_tensor(found.codes).view(-1, group * grid.bits // 8)
        self._scales = as_tensor(found.scales).view(-1)
        self._zeros = None if found.zeros is None else as_tensor(found.zeros).view(-1)

    def write(
        self,
        places: range,
        codes: "torch.Tensor",
        scale: "torch.Tensor",
        zero: "torch.Tensor | None",
    ) -> None:
        """Codes [group, B], scales and zero points [B]."""
        at = slice(places.start, places.stop, places.step)
        if self._packed:
            codes = codes[1::2] * 16 + codes[0::2]
        self._codes[at] = codes.t()
        self._scales[at] = scale.to(self._scales.dtype)
        if self._zeros is not None and zero is not None:
            self._zeros[at] = zero.to(self._zeros.dtype)
