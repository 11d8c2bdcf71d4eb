"""Weights of the reference backend: storage forms kept as they are, dequantized panel by panel.

A ``Panel`` is the definition of each storage form in fp32 (formulas in ``kernels/forms.py``): some
rows of a weight, bound once to the scratch they are dequantized into, because making views costs
as much as small arithmetic. A four-bit code byte holds two columns, so a panel has two *planes*,
even columns and odd columns: interleaving them would cost more than the product. ``multiply``
splits the other factor in the same way.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16
from llmrun.kernels.forms import nbytes as form_bytes
from llmrun.kernels.reference.arrays import as_tensor

PANEL_BYTES = 2 << 20
"""Size of a dequantized panel: with its codes it should stay in a core's L2 cache."""


class Scratch:
    """Memory for one panel at a time, kept for good.

    Page faults of fresh 200 KB arrays took ten times as long as masking their nibbles.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._device = device

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous array of a shape; what was taken for the same use shares its memory."""
        size = math.prod(shape)
        held = self._memory.get((use, dtype))
        if held is None or held.numel() < size:
            held = torch.empty(size, dtype=dtype, device=self._device)
            self._memory[use, dtype] = held
        return held[:size].view(shape)


class Panel:
    """Rows of a weight and the scratch they go to. ``planes``: fp32 [n, K / planes] each."""

    def __init__(
        self, form: type[Form], tensors: dict[str, torch.Tensor], k: int, scratch: Scratch
    ) -> None:
        self._form = form
        self._tensors = tensors
        n = tensors["w" if form is Dense else "codes"].shape[0]
        n_planes = 1 if form is Dense else k // tensors["codes"].shape[1]
        whole = scratch.take("planes", (n_planes, n, k // n_planes), torch.float32)
        self.planes = tuple(whole)
        if form is not Dense:
            codes, scales = tensors["codes"], tensors["scales"]
            self._bytes = scratch.take("codes", tuple(codes.shape), torch.uint8)
            # The columns of a group lie side by side in every plane.
            self._groups = whole.view(n_planes, *scales.shape, -1)
            self._scales = scratch.take("scales", (*scales.shape, 1), torch.float32)

    def fill(self) -> None:
        """Dequantize: ``s * u``, ``s * (u - middle)`` or ``s * table[u]``; minima are left out."""
        if self._form is Dense:
            self.planes[0].copy_(self._tensors["w"])
            return
        for number, plane in enumerate(self.planes):
            codes = self._codes(number)
            if self._form is Lut16:
                torch.index_select(
                    self._tensors["table"], 0, codes.flatten().int(), out=plane.view(-1)
                )
            else:
                plane.copy_(codes)
        self._scales.squeeze(-1).copy_(self._tensors["scales"])
        self._groups.mul_(self._scales)

    def _codes(self, plane: int) -> torch.Tensor:
        # The middle is taken off in 8 bits, before the conversion: a pass over bytes, not floats.
        codes = self._tensors["codes"]
        symmetric = self._form is GroupInt and "mins" not in self._tensors
        if len(self.planes) == 1:
            if not symmetric:
                return codes
            return torch.sub(codes, 128, out=self._bytes).view(torch.int8)
        if plane == 0:
            torch.bitwise_and(codes, 15, out=self._bytes)
        else:
            torch.bitwise_right_shift(codes, 4, out=self._bytes)
        return self._bytes.sub_(8).view(torch.int8) if symmetric else self._bytes


@dataclass(frozen=True, eq=False)
class TorchWeight:
    """A 2-D weight [N, K] on a device. ``tensors`` are those of the form, unchanged.

    ``panels``: its rows from the first to the last (none for fp32, which needs no scratch).
    ``columns``: the input each column multiplies, if not in order.
    """

    kind: str
    shape: tuple[int, int]
    nbytes: int
    form: type[Form]
    tensors: dict[str, torch.Tensor]
    panels: tuple[tuple[slice, Panel], ...]
    columns: torch.Tensor | None = None

    def minima(self, index: torch.Tensor | slice = slice(None)) -> torch.Tensor | None:
        """Minima of some rows, fp32 [n, groups]: the part of the weight without a code."""
        mins = self.tensors.get("mins")
        if mins is None:
            return None
        if mins.dtype is not torch.uint8:
            return mins[index].float()
        return (self.tensors["scales"][index].float() * mins[index].float()).neg_()

    def gather_rows(self, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the rows ``index`` [n] into ``out`` [n, K] fp32 and return it."""
        n, k = len(index), self.shape[1]
        panel = Panel(self.form, _rows(self.tensors, index), k, Scratch(out.device))
        panel.fill()
        for number, plane in enumerate(panel.planes):
            out[:, number :: len(panel.planes)] = plane
        mins = self.minima(index)
        if mins is not None:
            out.view(n, mins.shape[1], -1).add_(mins[..., None])
        if self.columns is not None:
            out.copy_(torch.empty_like(out).index_copy_(1, self.columns, out))
        return out

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """y[M, N] = x[M, K] W^T, panel by panel."""
        if self.columns is not None:
            x = x[:, self.columns]
        if not self.panels:
            torch.mm(x, self.tensors["w"].t(), out=y)
            return
        n_planes = len(self.panels[0][1].planes)
        split = [x[:, plane::n_planes].contiguous() for plane in range(n_planes)]
        for rows, panel in self.panels:
            panel.fill()
            part = y[:, rows]
            torch.mm(split[0], panel.planes[0].t(), out=part)
            for columns, plane in zip(split[1:], panel.planes[1:], strict=True):
                part.addmm_(columns, plane.t())
        mins = self.minima()
        if mins is not None:
            group_sums = x.view(x.shape[0], mins.shape[1], -1).sum(-1)
            y.addmm_(group_sums, mins.t())


def take_over(form: Form, scratch: Scratch, device: torch.device) -> TorchWeight:
    """Move a 2-D form to a device without changing a bit of it."""
    n, k = form.shape
    tensors = {name: as_tensor(array).to(device) for name, array in form.arrays.items()}
    columns = tensors.pop("columns", None)
    panels = () if form.kind == "f32" else tuple(_panels(type(form), tensors, (n, k), scratch))
    return TorchWeight(
        form.kind,
        (n, k),
        form_bytes(form),
        type(form),
        tensors,
        panels,
        None if columns is None else columns.long(),
    )


def _panels(
    form: type[Form], tensors: dict[str, torch.Tensor], shape: tuple[int, int], scratch: Scratch
) -> Iterator[tuple[slice, Panel]]:
    n, k = shape
    count = math.ceil(n / max(1, PANEL_BYTES // (4 * k)))
    step = math.ceil(n / count)  # panels of near-equal size
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        yield rows, Panel(form, _rows(tensors, rows), k, scratch)


def _rows(tensors: dict[str, torch.Tensor], index: slice | torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: t if name == "table" else t[index] for name, t in tensors.items()}
