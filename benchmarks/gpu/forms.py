"""Random weights as storage forms, made in the time it takes to copy them.

One random block is repeated: no quantizer runs, and the bytes cost what those of a model cost. The
block's length has no factor in common with that of a row, so rows differ.
"""

import math
from collections.abc import Callable
from functools import cache

import torch

from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16, rows
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.reference.arrays import like_host
from llmrun.kernels.reference.weights import Scratch, take_over

BLOCK = 1_048_573
"""Elements of the block; a prime number."""

NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""The 16 values of nf4 (Dettmers et al. 2023)."""

KINDS = (
    "bf16", "f16", "f32", "w8 row", "w8 g128", "w8 g32 +min", "w4 g128", "w4 g32", "w4 g64 +min",
    "w4 g128 +zero", "w4 row", "w4 g16", "lut g64", "lut g32", "w4 g128 order",
)  # fmt: skip
"""All kinds ``random_form`` knows."""


def random_form(kind: str, shape: tuple[int, int]) -> Form:
    """A weight of one of ``KINDS``: about N(0, 1/K) as it is used, a few scales negative."""
    n, k = shape
    name, *more = kind.split(" ")
    size = k**-0.5
    if name in ("bf16", "f16", "f32"):
        return Dense(_filled(DType[name.upper()], shape, size, normal=True))
    group = k if more[0] == "row" else int(more[0][1:])
    scales = DType.BF16 if name == "w4" and "+min" not in more else DType.F16
    if name == "lut":
        codes = _filled(DType.U8, (n, k // 2), 0)
        _, table = host = like_host(DType.F32, (16,))
        table.copy_(torch.tensor(NF4))
        scale = _filled(DType.F32, (n, k // group), 2.3 * size)
        return Lut16(group, codes, host[0], scale, shape)
    bits = 4 if name == "w4" else 8
    step = size / (4.6 if bits == 4 else 74)
    return GroupInt(
        bits,
        0 if group == k else group,
        _filled(DType.U8, (n, k * bits // 8), 0),
        _filled(scales, (n, k // group), step),
        _minima(more, scales, (n, k // group), step),
        shape,
        columns=_order(k) if "order" in more else None,
    )


def _minima(
    more: list[str], scales: DType, shape: tuple[int, int], step: float
) -> HostArray | None:
    if "+min" in more:
        return _filled(scales, shape, -7.5 * step)
    if "+zero" not in more:
        return None
    host, view = like_host(DType.U8, shape)
    view.copy_(torch.randint(6, 10, shape, dtype=torch.uint8))
    return host


def _order(k: int) -> HostArray:
    host, view = like_host(DType.I32, (k,))
    view.copy_(torch.randperm(k, generator=torch.Generator().manual_seed(1)))
    return host


def _filled(
    dtype: DType, shape: tuple[int, ...], size: float, *, normal: bool = False
) -> HostArray:
    """``normal``: N(0, size^2); else bytes, or numbers around ``size``, one in 64 negative."""
    host, view = like_host(dtype, shape)
    flat, block = view.view(-1), _block(dtype, size, normal)
    for start in range(0, flat.numel(), BLOCK):
        part = flat[start : start + BLOCK]
        part.copy_(block[: part.numel()])
    return host


@cache
def _block(dtype: DType, size: float, normal: bool) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    if dtype is DType.U8:
        return torch.randint(0, 256, (BLOCK,), dtype=torch.uint8, generator=random)
    if normal:
        numbers = torch.randn(BLOCK, generator=random) * size
    else:
        numbers = (torch.rand(BLOCK, generator=random) + 0.5) * size
        numbers[::64] *= -1.0
    wanted: dict[DType, torch.dtype] = {
        DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32,
    }  # fmt: skip
    return numbers.to(wanted[dtype])


Rows = Callable[[torch.Tensor], torch.Tensor]


def sample(form: Form, device: torch.device, most: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of a form, the last ones included: their numbers, and the weights in float64.

    The weights are those of ``kernels/forms.py``, by the reference: what a kernel is held against.
    """
    n, k = form.shape
    step = max(1, math.ceil(n / most))
    picked = sorted({*range(0, n, step), *range(max(0, n - 32), n)})
    weight = take_over(rows(form, picked), Scratch(device), device)
    dense = torch.empty(len(picked), k, device=device)
    weight.gather_rows(torch.arange(len(picked), device=device), dense)
    return torch.tensor(picked, device=device), dense.double()
