"""What the codes of a storage form mean: any form back to fp32, by the formulas of the forms.

Products and sums are rounded one by one in fp32 (no fused multiply-add). numpy is imported on
first use.
"""

from typing import TYPE_CHECKING

from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.arrays import floats, nibbles, unsigned

if TYPE_CHECKING:
    from llmrun.quant.arrays import Floats

_PANEL = 1 << 18
"""Weights taken at a time: with their codes they stay in a core's second-level cache."""


def dequantize(form: Form) -> HostArray:
    """Return the weight as F32, [N, K] (a dense form keeps its own shape)."""
    result = empty(DType.F32, form.shape)
    view = floats(result)
    if isinstance(form, Dense):
        view[...] = floats(form.w)
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
            stored = view[rows].copy()
            view[rows][:, unsigned(form.columns)] = stored
    return result


def _group_int(form: GroupInt, rows: slice, out: "Floats") -> None:
    import numpy as np

    codes = unsigned(form.codes)[rows]
    out[...] = nibbles(codes) if form.bits == 4 else codes
    groups = out.reshape(len(out), form.scales.shape[1], -1)
    scales = _some(form.scales, rows)
    with np.errstate(over="ignore"):
        if form.mins is None:
            groups -= np.float32(2 ** (form.bits - 1))
            groups *= scales
            return
        groups *= scales
        if form.mins.dtype is DType.U8:
            groups += -(scales * unsigned(form.mins)[rows].astype(np.float32)[:, :, None])
        else:
            groups += _some(form.mins, rows)


def _lut16(form: Lut16, rows: slice, out: "Floats") -> None:
    import numpy as np

    np.take(floats(form.table), nibbles(unsigned(form.codes)[rows]), out=out)
    groups = out.reshape(len(out), form.scales.shape[1], -1)
    with np.errstate(over="ignore"):
        groups *= _some(form.scales, rows)


def _some(array: HostArray, rows: slice) -> "Floats":
    """Some rows [R, G] of numbers as fp32 [R, G, 1]."""
    width = array.dtype.bits // 8 * array.shape[1]
    part = array.data[rows.start * width : rows.stop * width]
    return floats(HostArray(array.dtype, (rows.stop - rows.start, array.shape[1]), part))[
        :, :, None
    ]
