"""Rows of a weight in any form, looked up by id: the embedding of tokens.

One program: 128 columns of one token's row, in plain arithmetic, fp32.
"""

import torch
import triton
import triton.language as tl

from llmrun.errors import UnavailableError
from llmrun.kernels.gpu.arrays import TILE_K, Fold, GpuWeight, Prepared, padded
from llmrun.kernels.gpu.mode import Specialization
from llmrun.kernels.gpu.rounding import to_bf16


@triton.jit
def row_codes(codes, tile, row, FORM: tl.constexpr):
    """The codes u of one row of a tile in the order of its 128 columns, see ``layout``."""
    column = tl.arange(0, 128)
    right = column % 2
    pair = column // 2 % 16
    if FORM == "w8":
        at = codes + tile * 2048 + row * 32 + column // 64 * 16 + pair
        return (tl.load(at) >> (column // 32 % 2 * 8 + right * 16)) & 255
    else:
        words = tl.load(codes + tile * 1024 + row * 16 + pair)
        shift = column // 32 * 4 + right * 16 if FORM == "w4" else column // 32 * 8 + right * 4
        return (words >> shift) & 15


@triton.jit
def row_values(weight, row, tile, k, FORM: tl.constexpr, GROUP: tl.constexpr, MINS: tl.constexpr):
    """128 columns of a row in fp32. ``weight``: pointers to codes, scales, minima and table."""
    codes, scales, mins, table = weight
    column = tl.arange(0, 128)
    if FORM == "dense":
        at = tile * 128 + column
        return tl.load(codes + row.to(tl.int64) * k + at, mask=at < k, other=0.0).to(tl.float32)
    else:
        tiles = row.to(tl.int64) // 64 * ((k + 127) // 128) + tile
        inside = row % 64
        u = row_codes(codes, tiles, inside, FORM)
        lane = inside // 16 * 16 + inside % 8 * 2 + inside // 8 % 2
        group = (tiles * (128 // GROUP) + column // GROUP) * 64 + lane
        scale = tl.load(scales + group).to(tl.float32)
        if FORM == "lut":
            return scale * tl.load(table + u)
        elif MINS:
            return scale * u.to(tl.float32) + tl.load(mins + group)
        else:
            return scale * (u - (8 if FORM == "w4" else 128)).to(tl.float32)


@triton.jit(
    do_not_specialize=["h_stride"], do_not_specialize_on_alignment=["ids", "slots", "h", "gamma"]
)
def embed_kernel(
    codes, scales, mins, table, k, ids, slots, factor, h, h_stride,
    onto_u, onto_squares, gamma, offset,
    FORM: tl.constexpr, GROUP: tl.constexpr, MINS: tl.constexpr, ONTO: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    """h[token] = row ``ids[token]`` times ``factor``, and that as inputs of the next linear."""
    token = tl.program_id(0)
    tile = tl.program_id(1)
    if tl.load(slots + token) >= 0:
        row = tl.load(ids + token)
        value = row_values((codes, scales, mins, table), row, tile, k, FORM, GROUP, MINS) * factor
        column = tile * 128 + tl.arange(0, 128)
        inside = column < k
        value = tl.where(inside, value, 0.0)
        tl.store(h + token.to(tl.int64) * h_stride + column, value, mask=inside)
        if ONTO:
            stride = (k + 127) // 128 * 128
            pieces = (k + 63) // 64
            piece = tile * 2 + tl.arange(0, 2)
            squares = tl.sum(tl.reshape(value * value, (2, 64)), 1)
            tl.store(onto_squares + token * pieces + piece, squares, mask=piece < pieces)
            if FOLD:
                value *= tl.load(gamma + column, mask=inside, other=0.0) + offset
            tl.store(onto_u + token * stride + column, to_bf16(value), mask=inside)


def embed_rows(
    weight: GpuWeight,
    ids: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    h: torch.Tensor,
    onto: Prepared | None,
    fold: Fold | None,
    m: int,
) -> None:
    """h[i] = weight[ids[i]] * scale for i < m where ``slots[i]`` is not -1 (both int32 [m]).

    h fp32 [rows, K]; ``onto``: h, folded, as inputs of the next linear (m at most ``SMALL``).
    """
    if weight.columns is not None:
        raise UnavailableError(
            "the GPU kernels do not serve an embedding whose columns are reordered",
            "choose a scheme with -q int8 --requantize",
        )
    k = weight.shape[1]
    codes = weight.codes
    embed_kernel[(m, padded(k, TILE_K) // TILE_K)](
        codes,
        codes if weight.scales is None else weight.scales,
        codes if weight.mins is None else weight.mins,
        codes if weight.table is None else weight.table,
        k,
        ids,
        slots,
        scale,
        h,
        h.stride(0),
        h if onto is None else onto.u,
        h if onto is None else onto.squares,
        h if fold is None else fold.gamma,
        0.0 if fold is None else fold.offset,
        FORM=weight.form,
        GROUP=weight.group,
        MINS=weight.mins is not None,
        ONTO=onto is not None,
        FOLD=fold is not None,
        num_warps=1,
    )


def specializations() -> list[Specialization]:
    """Variants to check: a quantized embedding and a dense one."""
    return [
        _variant("w8", 128, {"codes": "*i32", "scales": "*bf16", "mins": "*i32", "table": "*i32"}),
        _variant("dense", 0, dict.fromkeys(("codes", "scales", "mins", "table"), "*bf16")),
    ]


def _variant(form: str, group: int, weight: dict[str, str]) -> Specialization:
    constants = {"FORM": form, "GROUP": group, "MINS": False, "ONTO": True, "FOLD": True}
    signature = {
        **weight,
        "k": "i32",
        "ids": "*i32",
        "slots": "*i32",
        "factor": "fp32",
        "h": "*fp32",
        "h_stride": "i32",
        "onto_u": "*bf16",
        "onto_squares": "*fp32",
        "gamma": "*fp32",
        "offset": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    return Specialization(f"embed {form}", embed_kernel, signature, constants, num_warps=1)
