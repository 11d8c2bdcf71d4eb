"""Taking weights over: storage forms into the layout of the device, tensor by tensor.

Codes are moved as they are and rearranged on the device in pieces, so the peak is the weights and
a piece. ``originals`` is the inverse.
"""

import torch

from llmrun.kernels.forms import ROW, Dense, Form, Lut16
from llmrun.kernels.gpu import layout
from llmrun.kernels.gpu.arrays import TILE_K, TILE_N, GpuWeight, padded
from llmrun.kernels.host import HostArray
from llmrun.kernels.reference.arrays import as_tensor

PIECE_BYTES = 64 << 20
"""Codes that are rearranged at a time: large enough to keep a card busy."""

PACK = {"w4": layout.pack_w4, "w8": layout.pack_w8, "lut": layout.pack_lut}
UNPACK = {"w4": layout.unpack_w4, "w8": layout.unpack_w8, "lut": layout.unpack_lut}


def take_over(form: Form, device: torch.device) -> GpuWeight:
    """Move a 2-D form to ``device`` in the layout its kernels read, without changing a bit."""
    n, k = form.shape
    if isinstance(form, Dense):
        dense = as_tensor(form.w).to(device, copy=True)
        return GpuWeight("dense", form.kind, (n, k), dense.nbytes, dense)
    name = "lut" if isinstance(form, Lut16) else f"w{form.bits}"
    group = TILE_K if form.group == ROW else form.group
    columns = padded(k, TILE_K) // group
    scales = as_tensor(form.scales).to(device)
    mins = table = order = None
    if isinstance(form, Lut16):
        table = layout.table_words(as_tensor(form.table)).to(device)
    else:
        if form.mins is not None:
            mins = layout.pack_groups(_minima(form.mins, scales), columns)
        if form.columns is not None:
            order = as_tensor(form.columns).to(device, copy=True)
    codes = _packed_codes(name, as_tensor(form.codes), device)
    scales = layout.pack_groups(scales, columns)
    held = [tensor.nbytes for tensor in (codes, scales, mins, table, order) if tensor is not None]
    return GpuWeight(name, form.kind, (n, k), sum(held), codes, group, scales, mins, table, order)


def originals(weight: GpuWeight) -> dict[str, torch.Tensor]:
    """The arrays a weight was made of, for tests: ``w`` of a dense one; else ``codes``, ``scales``
    and, if any, ``mins`` (fp32, zero points multiplied out), ``table`` and ``columns``.

    The one scale of a whole row comes back as often as it is stored.
    """
    n, k = weight.shape
    if weight.form == "dense":
        return {"w": weight.codes}
    assert weight.scales is not None
    groups = -(-k // weight.group)
    arrays = {
        "codes": UNPACK[weight.form](weight.codes, n, k),
        "scales": layout.unpack_groups(weight.scales, n, groups),
    }
    if weight.mins is not None:
        arrays["mins"] = layout.unpack_groups(weight.mins, n, groups)
    if weight.table is not None:
        arrays["table"] = weight.table[:16]
    if weight.columns is not None:
        arrays["columns"] = weight.columns
    return arrays


def _packed_codes(name: str, codes: torch.Tensor, device: torch.device) -> torch.Tensor:
    n, width = codes.shape
    words = 32 if name == "w8" else 16  # of a tile's row
    shape = padded(n, TILE_N) // TILE_N, padded(width, 4 * words) // (4 * words), TILE_N, words
    packed = torch.empty(shape, dtype=torch.int32, device=device)
    tiles = max(1, PIECE_BYTES // (width * TILE_N))
    for first in range(0, len(packed), tiles):
        piece = codes[first * TILE_N : (first + tiles) * TILE_N].to(device)
        packed[first : first + tiles] = PACK[name](piece)
    return packed


def _minima(mins: HostArray, scales: torch.Tensor) -> torch.Tensor:
    values = as_tensor(mins).to(scales.device)
    if values.dtype is not torch.uint8:
        return values.float()
    return (scales.float() * values.float()).neg_()
