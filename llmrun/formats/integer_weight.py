"""Integer weights of compressed-tensors: packed words (``pack-quantized``) or plain bytes.

Packed: ``weight_packed`` i32 [N, K * bits / 32], ``weight_shape``, ``weight_scale`` and,
asymmetric, ``weight_zero_point`` packed along the rows. Codes of 4 and 8 bits are GroupInt's own
bytes, a view of the file; other widths are put into the next of the two. Plain (``int-quantized``):
``weight`` i8 [N, K], ``weight_scale`` and ``weight_zero_point`` i8. No value changes. Old packed
files may have ``weight_g_idx``, each column's group: scattered, such a weight is opened to F32.
"""

import sys
from array import array
from functools import partial
from pathlib import Path

from llmrun.formats.config_groups import ALL, INTEGERS, PACKED, WeightScheme
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
from llmrun.quant.codes import container_bits, offset, unpacked
from llmrun.quant.group_scales import reordered, scales_and_minima, shift_of
from llmrun.quant.zero_points import unpacked_zeros, unsigned_zeros

_ONE = ((), (1,), (1, 1))
"""Shapes of a scale for the whole tensor."""


def packed_weight(module: str, scheme: WeightScheme, parts: Parts, folder: Path) -> PartedWeight:
    """Check the parts of a pack-quantized weight against the config."""
    words = need(parts, "weight_packed", module, folder)
    scale = need(parts, "weight_scale", module, folder)
    extents = need(parts, "weight_shape", module, folder)
    expect(extents, (2,), ("I64", "I32"))
    width = extents.nbytes // 2
    n, k = (
        int.from_bytes(extents.data[at : at + width], "little", signed=True) for at in (0, width)
    )
    group = scheme.block[1] or k
    if n < 1 or k < 1 or k % group or k * scheme.bits % 32:
        raise extents.refused(f"says {n} x {k}, which does not divide into groups of {group}")
    expect(words, (n, k * scheme.bits // 32), ("I32",))
    _expect_by_group(scale, scheme, (n, k), FLOAT_NAMES)
    zeros = _zero_point(module, scheme, parts, folder)
    if zeros is not None:
        if scheme.block == (ALL, ALL):
            raise zeros.refused("is a zero point for the whole tensor, which is never packed")
        expect(zeros, (-(-n * scheme.bits // 32), k // group), ("I32",))
    order = parts.get("weight_g_idx")
    if scheme.reordered:
        order = need(parts, "weight_g_idx", module, folder)
    if order is not None:
        expect(order, (k,), ("I32",))
    known = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    only(parts, known, PACKED)
    name = f"{module}.weight"
    if order is not None and not _in_order(order, k, group):
        label = f"int{scheme.bits} with reordered columns, opened to F32"
        read_opened = partial(_read_reordered, scheme, (n, k), order, parts)
        return opened_weight(name, (n, k), label, parts, read_opened)
    kind = _kind(container_bits(scheme.bits), scheme, scale)
    return weight_of(name, (n, k), kind, parts, partial(_read_packed, scheme, (n, k), parts))


def plain_weight(module: str, scheme: WeightScheme, parts: Parts, folder: Path) -> PartedWeight:
    """Check the parts of an int-quantized weight against the config."""
    codes = need(parts, "weight", module, folder)
    scale = need(parts, "weight_scale", module, folder)
    extents(codes, 2)
    n, k = codes.shape
    expect(codes, (n, k), ("I8",))
    if k % (scheme.block[1] or k):
        raise codes.refused(f"does not divide into groups of {scheme.block[1]}")
    _expect_by_group(scale, scheme, (n, k), FLOAT_NAMES)
    zeros = _zero_point(module, scheme, parts, folder)
    if zeros is not None:
        _expect_by_group(zeros, scheme, (n, k), ("I8",))
    only(parts, ("weight", "weight_scale", "weight_zero_point"), INTEGERS)
    read = partial(_read_plain, scheme, (n, k), parts)
    return weight_of(f"{module}.weight", (n, k), _kind(8, scheme, scale), parts, read)


def _zero_point(
    module: str, scheme: WeightScheme, parts: Parts, folder: Path
) -> StoredTensor | None:
    if not scheme.symmetric:
        return need(parts, "weight_zero_point", module, folder)
    if "weight_zero_point" in parts:
        raise parts["weight_zero_point"].refused("is a zero point, but the config says symmetric")
    return None


def _expect_by_group(
    stored: StoredTensor, scheme: WeightScheme, shape: tuple[int, int], dtypes: tuple[str, ...]
) -> None:
    n, k = shape
    if scheme.block == (ALL, ALL):
        expect(stored, stored.shape if stored.shape in _ONE else (1,), dtypes)
    else:
        expect(stored, (n, k // (scheme.block[1] or k)), dtypes)


def _in_order(order: StoredTensor, k: int, group: int) -> bool:
    """Whether the columns of each group are neighbours; unset indices, all -1, mean they are.

    Refuses an index of no group.
    """
    numbers = array("i", bytes(order.data))
    if sys.byteorder == "big":
        numbers.byteswap()
    if numbers in (array("i", (i // group for i in range(k))), array("i", [-1]) * k):
        return True
    outside = next((at for at, own in enumerate(numbers) if not 0 <= own < k // group), None)
    if outside is not None:
        raise order.refused(f"names group {numbers[outside]} of {k // group} at {outside}")
    return False


def _kind(bits: int, scheme: WeightScheme, scale: StoredTensor) -> str:
    """As GroupInt's ``kind``, in which the only scale of a whole tensor serves each row."""
    group = f"g{scheme.block[1]}" if scheme.block[1] else "row"
    return f"int{bits} {group}{'' if scheme.symmetric else f' +{shift_of(scale.dtype)}'}"


def _read_packed(scheme: WeightScheme, shape: tuple[int, int], parts: Parts) -> GroupInt:
    n, k = shape
    bits, words = scheme.bits, parts["weight_packed"].data
    container = container_bits(bits)
    scales = _by_row(parts["weight_scale"], n)
    zeros = None
    if not scheme.symmetric:
        zeros = unpacked_zeros(parts["weight_zero_point"].array(), scales.shape, bits)
    if bits == container:
        codes = HostArray(DType.U8, (n, k * bits // 8), words)
    else:
        make = partial(unpacked, words, bits, shape, shift=scheme.symmetric)
        codes = LaterArray(DType.U8, (n, k * container // 8), lambda: make().data)
    return _group_int(container, scheme, codes, scales, zeros, shape, parts)


def _read_reordered(
    scheme: WeightScheme, shape: tuple[int, int], order: StoredTensor, parts: Parts
) -> Dense:
    """Open a weight whose groups are scattered over the columns, which no form holds."""
    n, bits = shape[0], scheme.bits
    codes = unpacked(parts["weight_packed"].data, bits, shape, shift=False)
    scales = _by_row(parts["weight_scale"], n)
    check_products(parts["weight_scale"], scales, 2**bits)
    if scheme.symmetric:
        middle = bytes((2 ** (bits - 1),))
        zeros = HostArray(DType.U8, scales.shape, memoryview(bytearray(middle * scales.size)))
    else:
        zeros = unpacked_zeros(parts["weight_zero_point"].array(), scales.shape, bits)
    return Dense(reordered(codes, container_bits(bits), scales, zeros, order.array()))


def _read_plain(scheme: WeightScheme, shape: tuple[int, int], parts: Parts) -> GroupInt:
    scales = _by_row(parts["weight_scale"], shape[0])
    zeros = None
    if not scheme.symmetric:
        zeros = unsigned_zeros(_by_row(parts["weight_zero_point"], shape[0]))
    codes = LaterArray(DType.U8, shape, lambda: offset(parts["weight"].data, shape).data)
    return _group_int(8, scheme, codes, scales, zeros, shape, parts)


def _by_row(stored: StoredTensor, n: int) -> HostArray:
    """Return scales or zero points per row and group; those of a whole tensor are repeated."""
    array = stored.array()
    check_finite(stored, array)
    if array.size > 1 or len(array.shape) == 2:
        return array
    return HostArray(array.dtype, (n, 1), memoryview(bytearray(array.data) * n))


def _group_int(
    bits: int,
    scheme: WeightScheme,
    codes: HostArray,
    scales: HostArray,
    zeros: HostArray | None,
    shape: tuple[int, int],
    parts: Parts,
) -> GroupInt:
    group = scheme.block[1]
    if zeros is not None:
        check_products(parts["weight_scale"], scales, 2**bits)
    scales, mins = scales_and_minima(scales, zeros, group, group, shape[1])
    return GroupInt(bits, group, codes, scales, mins, shape)
