"""Linears of long steps: weights are dequantized, some rows at a time, and multiplied in bf16.

For hundreds of tokens the multiply decides, and the vendor's library is best at it. The scratch is
bounded, so long prompts cost no memory for weights. Weights are rounded to bf16 once (relative
error 2^-9), also dense ones of more bits; sums are fp32.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from llmrun.kernels.gpu.arrays import TILE_K, TILE_N, GpuWeight, padded
from llmrun.kernels.gpu.linear import SCALES, packed_pointers
from llmrun.kernels.gpu.mode import Specialization
from llmrun.kernels.gpu.product import decoded, minimum, tile_groups, tile_words
from llmrun.kernels.gpu.rounding import to_bf16
from llmrun.kernels.gpu.streams import moved

SCRATCH_WEIGHTS = 64 << 20
"""Weights dequantized at a time (128 MB): enough rows for a product to be fast."""


class Scratch:
    """Memory for dequantized weights, kept for good."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.bfloat16, device=device)

    def take(self, n: int, k: int) -> torch.Tensor:
        """bf16 [n, k]; what was taken before shares its memory."""
        if self._memory.numel() < n * k:
            self._memory = self._memory.new_empty(0)  # the smaller one goes first
            self._memory = torch.empty(n * k, dtype=torch.bfloat16, device=self._device)
        return self._memory[: n * k].view(n, k)


@triton.jit(do_not_specialize=["n_rows", "first"])
def dequantize_kernel(
    codes, scales, mins, table, out, n_rows, k, first,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_KIND: tl.constexpr, MINS: tl.constexpr,
):  # fmt: skip
    """Tile (row ``first`` + program, column) of a packed weight as bf16 into out [n_rows, k]."""
    tile_row = tl.program_id(0)
    tile = tl.program_id(1)
    tiles = (first + tile_row).to(tl.int64) * ((k + 127) // 128) + tile
    codes, scales, mins, table = moved((codes, scales, mins, table), tiles, FORM, GROUP)
    words = tile_words(codes, 0, FORM)
    scale = tile_groups(scales, 0, GROUP, SCALE_KIND)
    low = tile_groups(mins, 0, GROUP, "f32") if MINS else scale
    n = tile_row * 64 + tl.arange(0, 64)
    for j in tl.static_range(4):
        values = decoded(words[j // 2], table, FORM, MINS, j).to(tl.float32)
        column = tl.arange(0, 32)
        if GROUP == 16:
            second = (column >= 16)[None, :]
            factor = tl.where(second, scale[2 * j + 1][:, None], scale[2 * j][:, None])
            lowest = tl.where(second, low[2 * j + 1][:, None], low[2 * j][:, None])
        else:
            factor = scale[32 * j // GROUP][:, None]
            lowest = low[32 * j // GROUP][:, None]
        values *= factor
        if MINS:
            values += minimum(lowest, factor, FORM)
        column += tile * 128 + 32 * j
        at = out + n.to(tl.int64)[:, None] * k + column[None, :]
        tl.store(at, to_bf16(values), mask=(n < n_rows)[:, None] & (column < k)[None, :])


def multiply(
    x: torch.Tensor,
    weight: GpuWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    scratch: Scratch,
    *,
    add: float | None = None,
) -> None:
    """y[T, N] = x W^T + b, or y += add * that; x bf16 [T, K], y fp32, maybe some columns of more.

    A weight with columns in an order of its own takes its inputs in that order.
    """
    if weight.columns is not None:
        x = x[:, weight.columns]
    for start, rows in blocks(weight, scratch):
        _product(x, rows, y[:, start : start + rows.shape[0]], add)
    if bias is not None:
        y.add_(bias, alpha=1.0 if add is None else add)


def blocks(weight: GpuWeight, scratch: Scratch) -> Iterator[tuple[int, torch.Tensor]]:
    """The weight in bf16, some rows at a time: the first one's number, and rows [n, K]."""
    n, k = weight.shape
    if weight.codes.dtype is torch.bfloat16:
        yield 0, weight.codes
        return
    step = max(TILE_N, SCRATCH_WEIGHTS // k // TILE_N * TILE_N)
    for start in range(0, n, step):
        out = scratch.take(min(step, n - start), k)
        if weight.form == "dense":
            out.copy_(weight.codes[start : start + step])
        else:
            _dequantize(weight, start // TILE_N, out)
        yield start, out


def _dequantize(weight: GpuWeight, first: int, out: torch.Tensor) -> None:
    n, k = out.shape
    assert weight.scales is not None
    dequantize_kernel[(padded(n, TILE_N) // TILE_N, padded(k, TILE_K) // TILE_K)](
        *packed_pointers(weight),
        out,
        n,
        k,
        first,
        FORM=weight.form,
        GROUP=weight.group,
        SCALE_KIND=SCALES[weight.scales.dtype],
        MINS=weight.mins is not None,
        num_warps=2,
    )


def _product(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, add: float | None) -> None:
    if x.device.type == "cuda":
        if add is None:
            torch.mm(x, w.t(), out_dtype=torch.float32, out=y)
        else:
            torch.addmm(y, x, w.t(), out_dtype=torch.float32, alpha=add, out=y)
        return
    product = x.float() @ w.float().t()  # interpreted: a CPU's product of bf16 gives bf16
    if add is None:
        y.copy_(product)
    else:
        y.add_(product, alpha=add)


def specializations() -> list[Specialization]:
    """Variants to check."""
    return [_variant("w4", 128), _variant("w8", 32), _variant("lut", 64)]


def _variant(form: str, group: int) -> Specialization:
    constants = {"FORM": form, "GROUP": group, "SCALE_KIND": "bf16", "MINS": False}
    signature = {
        "codes": "*i32",
        "scales": "*i32",
        "mins": "*i32",
        "table": "*fp32" if form == "lut" else "*i32",
        "out": "*bf16",
        "n_rows": "i32",
        "k": "i32",
        "first": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    name = f"dequantize {form} g{group}"
    return Specialization(
        name, dequantize_kernel, signature, constants, num_warps=2, multiples_of_16=("k",)
    )
