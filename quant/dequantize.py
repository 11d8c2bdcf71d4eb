"""What the codes of a storage form mean: any form back to fp32, by the formulas of the forms.

Products and sums are rounded one by one in fp32 (no fused multiply-add).
"""

from typing import TYPE_CHECKING

from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray

if TYPE_CHECKING:
    import torch

_PANEL = 1 << 20
"""Weights taken at a time, so that temporaries stay small beside the result."""


def dequantize(form: Form) -> HostArray:
    """Return the weight as F32, [N, K] (a dense form keeps its own shape)."""
    from llmrun.kernels.reference.arrays import as_tensor, like_host

    result, view = like_host(DType.F32, form.shape)
    if isinstance(form, Dense):
        view.copy_(as_tensor(form.w))
        return result
    n, k = form.shape
    step = max(1, _PANEL // k)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        if isinstance(form, Lut16):
            _lut16(form, rows, view[rows])
            continue
        _group_int(form, rows, view[rows])
        if form.columns is not None:
            columns = as_tensor(form.columns).long()
            view[rows] = view.new_empty(view[rows].shape).index_copy_(1, columns, view[rows])
    return result


def _group_int(form: GroupInt, rows: slice, out: "torch.Tensor") -> None:
    from llmrun.kernels.reference.arrays import as_tensor

    codes = as_tensor(form.codes)[rows]
    out.copy_(_nibbles(codes) if form.bits == 4 else codes)
    groups = out.view(out.shape[0], form.scales.shape[1], -1)
    scales = as_tensor(form.scales)[rows].float().unsqueeze(2)
    if form.mins is None:
        groups.sub_(2 ** (form.bits - 1)).mul_(scales)
        return
    minima = as_tensor(form.mins)[rows].float().unsqueeze(2)
    if form.mins.dtype is DType.U8:
        minima.mul_(scales).neg_()
    groups.mul_(scales).add_(minima)


def _lut16(form: Lut16, rows: slice, out: "torch.Tensor") -> None:
    from llmrun.kernels.reference.arrays import as_tensor

    out.copy_(as_tensor(form.table)[_nibbles(as_tensor(form.codes)[rows]).int()])
    groups = out.view(out.shape[0], form.scales.shape[1], -1)
    groups.mul_(as_tensor(form.scales)[rows].float().unsqueeze(2))


def _nibbles(codes: "torch.Tensor") -> "torch.Tensor":
    """Unpack u8 [N, K/2] to u8 [N, K]: the low nibble is the even k."""
    import torch

    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
