"""Weights of the reference backend: storage forms kept as they are, dequantized by rows.

``dequantize_rows`` is the definition of each storage form in fp32 (formulas in
``kernels/forms.py``); all matrix ops and the embedding go through it.
"""

from dataclasses import dataclass

import torch

from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16
from llmrun.kernels.forms import nbytes as form_bytes
from llmrun.kernels.reference.arrays import as_tensor

SCRATCH_BYTES = 4 << 20
"""Size of the fp32 scratch one panel of rows is dequantized into: it should stay in L2 or L3."""


@dataclass(frozen=True, eq=False)
class TorchWeight:
    """A 2-D weight [N, K] on a device. ``tensors`` are those of the form, unchanged."""

    kind: str
    shape: tuple[int, int]
    nbytes: int
    form: type[Form]
    bits: int
    group: int
    tensors: dict[str, torch.Tensor]

    def dequantize_rows(self, index: slice | torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the chosen rows into ``out`` [rows, K] fp32 and return it."""
        part = {name: t if name == "table" else t[index] for name, t in self.tensors.items()}
        if self.form is Dense:
            return out.copy_(part["w"])
        scale = part["scales"].float().unsqueeze(-1)
        grouped = out.view(out.shape[0], scale.shape[1], -1)  # (rows, groups, group)
        if self.form is Lut16:
            _spread_nibbles(part["codes"], part["table"], out)
            grouped.mul_(scale)
        elif "mins" in part:
            _spread_codes(part["codes"], self.bits, 0, out)
            grouped.mul_(scale).add_(part["mins"].float().unsqueeze(-1))
        else:
            _spread_codes(part["codes"], self.bits, 1 << (self.bits - 1), out)
            grouped.mul_(scale)
        return out


def take_over(form: Form, device: torch.device) -> TorchWeight:
    """Move a 2-D form to a device without changing a bit of it."""
    if isinstance(form, Dense):
        bits, group = form.w.dtype.bits, 0
    else:
        bits, group = (form.bits if isinstance(form, GroupInt) else 4), form.group
    n, k = form.shape
    tensors = {name: as_tensor(array).to(device) for name, array in form.arrays.items()}
    return TorchWeight(form.kind, (n, k), form_bytes(form), type(form), bits, group, tensors)


def panel_rows(weight: TorchWeight) -> int:
    """Rows of a weight that fit the scratch, at least one."""
    return max(1, SCRATCH_BYTES // (4 * weight.shape[1]))


def _spread_codes(codes: torch.Tensor, bits: int, offset: int, out: torch.Tensor) -> None:
    # The offset is taken off in 8 bits, before the conversion: a pass over bytes, not floats.
    # Codes stay within -128..255, so the int8 view is exact wherever an offset is subtracted.
    if bits == 8:
        out.copy_(codes if offset == 0 else (codes ^ 0x80).view(torch.int8))
        return
    pairs = out.view(out.shape[0], -1, 2)
    for position, nibbles in enumerate((codes & 15, codes >> 4)):
        pairs[..., position].copy_(
            nibbles if offset == 0 else nibbles.sub_(offset).view(torch.int8)
        )


def _spread_nibbles(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    pairs = out.view(out.shape[0], -1, 2)
    for position, nibbles in enumerate((codes & 15, codes >> 4)):
        pairs[..., position].copy_(table[nibbles.int()])
