"""Weights of eight-bit floats (E4M3) with a scale per tensor, row, group or block.

No storage form holds them, so ``read`` gives a dense weight, BF16 where that is exact and F32
otherwise; it is computed when its numbers are looked at, one tensor at a time. Whoever wants it
smaller in memory makes that of it.
"""

from functools import partial
from pathlib import Path

from llmrun.formats.config_groups import ALL, FLOATS, NVFP4, WeightScheme
from llmrun.formats.damage import shown
from llmrun.formats.parts import (
    FLOAT_NAMES,
    PartedWeight,
    Parts,
    check_finite,
    check_products,
    opened_weight,
    weight_of,
)
from llmrun.formats.safetensors_header import StoredTensor
from llmrun.formats.stored import expect, extents, need, only
from llmrun.kernels.forms import Dense, GroupInt
from llmrun.kernels.host import DType, HostArray, LaterArray
from llmrun.quant import fp8, nvfp4

E4M3 = "F8_E4M3"
_ONE = ((), (1,), (1, 1))
_POWERS = ("F8_E8M0", "U8")


def float8_weight(module: str, scheme: WeightScheme, parts: Parts, folder: Path) -> PartedWeight:
    """Check the parts of a float-quantized weight: ``weight`` and ``weight_scale``."""
    only(parts, ("weight", "weight_scale"), FLOATS)
    weight = need(parts, "weight", module, folder)
    scale = need(parts, "weight_scale", module, folder)
    return scaled(module, weight, scale, scheme)


def scaled(
    module: str,
    weight: StoredTensor,
    scale: StoredTensor,
    scheme: WeightScheme,
    powers: bool = False,
) -> PartedWeight:
    """Check E4M3 codes [N, K] and their scales, which a block at the edge has as well.

    ``powers``: scales may be eight-bit powers of two (E8M0, also stored as U8).
    """
    extents(weight, 2)
    n, k = weight.shape
    expect(weight, (n, k), (E4M3,))
    rows, columns = scheme.block[0] or n, scheme.block[1] or k
    if scheme.block[0] == 1 and k % columns:
        raise weight.refused(f"does not divide into groups of {columns}")
    dtypes = (*FLOAT_NAMES, *_POWERS) if powers else FLOAT_NAMES
    grid = (-(-n // rows), -(-k // columns))
    if scheme.block == (ALL, ALL):
        expect(scale, scale.shape if scale.shape in _ONE else (1,), dtypes)
    else:
        expect(scale, grid, dtypes)
    parts = {part.name: part for part in (weight, scale)}
    return opened_weight(
        f"{module}.weight",
        (n, k),
        f"{E4M3} {scheme.span}",
        parts,
        partial(_dense, weight, scale, (rows, columns), grid),
    )


def nvfp4_weight(module: str, scheme: WeightScheme, parts: Parts, folder: Path) -> PartedWeight:
    """Check the parts of a weight of four-bit floats with E4M3 scales and a scale for all."""
    only(parts, ("weight_packed", "weight_scale", "weight_global_scale"), NVFP4)
    packed = need(parts, "weight_packed", module, folder)
    scale = need(parts, "weight_scale", module, folder)
    common = need(parts, "weight_global_scale", module, folder)
    group = scheme.block[1]
    if len(packed.shape) != 2 or 0 in packed.shape or packed.shape[1] * 2 % group:
        raise packed.refused(f"has shape {shown(packed.shape)}, which is not in groups of {group}")
    n, k = packed.shape[0], 2 * packed.shape[1]
    expect(packed, packed.shape, ("U8",))
    expect(scale, (n, k // group), (E4M3,))
    expect(common, common.shape if common.shape in _ONE else (1,), ("F32",))
    read = partial(_nvfp4, packed, scale, common)
    return weight_of(f"{module}.weight", (n, k), f"int8 g{group}", parts, read)


def _dense(
    weight: StoredTensor, scale: StoredTensor, block: tuple[int, int], grid: tuple[int, int]
) -> Dense:
    scales = _scales(scale, grid)
    codes = HostArray(DType.U8, (weight.shape[0], weight.shape[1]), weight.data)
    dtype = fp8.dense_dtype(scales)

    def decoded() -> memoryview:
        index = fp8.first_nan(codes)
        if index is not None:
            raise weight.refused(f"is not finite at element {index}")
        return fp8.decode(codes, scales, block, dtype).data

    return Dense(LaterArray(dtype, codes.shape, decoded))


def _scales(stored: StoredTensor, grid: tuple[int, int]) -> HostArray:
    """Return checked scales in the shape of the grid of blocks."""
    if stored.dtype in _POWERS:
        scales = fp8.powers(HostArray(DType.U8, grid, stored.data))
    else:
        scales = HostArray(DType[stored.dtype], grid, stored.data)
    check_products(stored, scales, fp8.LARGEST)
    return scales


def _nvfp4(packed: StoredTensor, scale: StoredTensor, common: StoredTensor) -> GroupInt:
    check_finite(common, common.array())
    shape = (packed.shape[0], packed.shape[1])
    codes = HostArray(DType.U8, shape, packed.data)
    scales = HostArray(DType.U8, (scale.shape[0], scale.shape[1]), scale.data)
    form = nvfp4.group_int(codes, scales, HostArray(DType.F32, (1,), common.data))
    check_finite(scale, form.scales)
    return form
