"""bitsandbytes' stored weights as storage forms: codes are rearranged, never changed.

4 bit: blocks of a flattened weight share an absmax, so a block may straddle rows. Where a group of
32 or more divides both block and row, that is Lut16 with each absmax repeated; elsewhere the
weight is opened to fp32, by the same product. 8 bit: a row shares one scale. numpy is imported on
first use.
"""

from dataclasses import dataclass

from llmrun.kernels.bnb import Nested
from llmrun.kernels.host import DType, HostArray, LaterArray, empty
from llmrun.quant.arrays import floats, unsigned

NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = (*(value / 12 for value in _FP4), *(-value / 12 for value in _FP4))
TABLES = {"nf4": NF4, "fp4": FP4}
"""What each 4-bit code stands for, by bitsandbytes' name of the type."""

_CHUNK = 1 << 18
_LEVELS_8BIT = 127


@dataclass(frozen=True, eq=False)
class NestedScales(HostArray):
    """Scales of a form that were quantized themselves, and from what they were made: whoever
    writes the form stores that."""

    nested: Nested


def swapped(packed: HostArray, shape: tuple[int, ...]) -> HostArray:
    """Return U8 codes with their nibbles swapped: here the high nibble is the even k."""

    def made() -> memoryview:
        result = empty(DType.U8, shape)
        source, target = unsigned(packed).reshape(-1), unsigned(result).reshape(-1)
        for start in range(0, target.size, _CHUNK):
            part = source[start : start + _CHUNK]
            target[start : start + _CHUNK] = (part >> 4) | (part << 4)
        return result.data

    return LaterArray(DType.U8, shape, made)


def nested_scales(
    absmax: HostArray, table: HostArray, outer: HostArray, block: int, offset: float
) -> HostArray:
    """Return F32 scales: ``table[absmax[i]] * outer[i // block] + offset``, each step in fp32."""
    import numpy as np

    result = empty(DType.F32, absmax.shape)
    out = floats(result)
    out[...] = floats(table)[unsigned(absmax)]
    with np.errstate(over="ignore"):  # whoever reads the file refuses what is not finite
        out *= np.repeat(floats(outer), block)[: out.size]
        out += np.float32(offset)
    return result


def scales_of_blocks(scales: HostArray, group: int, block: int) -> HostArray | None:
    """Undo ``scales_of_groups``: F32 [B], one of every group of a block; None if they differ."""
    import numpy as np

    if block == group:
        return HostArray(DType.F32, (scales.size,), scales.data)
    each = block // group
    per_group = floats(scales).reshape(-1)
    absmax = empty(DType.F32, (-(-per_group.size // each),))
    floats(absmax)[...] = per_group[::each]
    same = np.array_equal(np.repeat(floats(absmax), each)[: per_group.size], per_group)
    return absmax if same else None


def scales_of_groups(
    absmax: HostArray, block: int, group: int, shape: tuple[int, int]
) -> HostArray:
    """Return F32 [N, K / group] of one absmax per ``block`` weights of the flattened weight."""
    import numpy as np

    n, k = shape
    if block == group:
        return HostArray(DType.F32, (n, k // group), absmax.data)
    result = empty(DType.F32, (n, k // group))
    floats(result).reshape(-1)[...] = np.repeat(floats(absmax), block // group)[: result.size]
    return result


def straddling(
    packed: HostArray, table: HostArray, absmax: HostArray, block: int, shape: tuple[int, int]
) -> HostArray:
    """Return the weight F32 [N, K], ``table[u] * absmax``, of blocks that straddle rows."""

    def made() -> memoryview:
        import numpy as np

        result = empty(DType.F32, shape)
        out, values, scales = floats(result).reshape(-1), floats(table), floats(absmax)
        source = unsigned(packed).reshape(-1)
        step = max(1, _CHUNK // block) * block
        for start in range(0, out.size, step):
            target = out[start : start + step]
            # bitsandbytes' blocks have an even number of weights, so whole bytes.
            part = source[start // 2 : (start + step) // 2]
            target[...] = values[np.stack((part >> 4, part & 15), axis=-1).reshape(-1)][
                : target.size
            ]
            own = scales[start // block : (start + step) // block]
            target *= np.repeat(own, block)[: target.size]
        return result.data

    return LaterArray(DType.F32, shape, made)


def row_scales(absmax: HostArray) -> HostArray:
    """Return F32 [N, 1]: the absmax of a row over 127, divided in fp32."""
    result = empty(DType.F32, (absmax.size, 1))
    floats(result)[:, 0] = floats(absmax) / _LEVELS_8BIT
    return result


def absmax_of_rows(scales: HostArray) -> HostArray | None:
    """Undo ``row_scales``: F32 [N], which are f16 numbers; None if these scales are not of any."""
    import numpy as np

    result = empty(DType.F32, (scales.size,))
    with np.errstate(over="ignore"):
        wide = floats(scales)[:, 0] * np.float32(_LEVELS_8BIT)
        floats(result)[...] = wide.astype(np.float16)
    return result if bytes(row_scales(result).data) == bytes(scales.data) else None


def signed(codes: HostArray) -> HostArray:
    """Return the codes U8 of GroupInt 8 as I8 around zero."""

    def made() -> memoryview:
        result = empty(DType.I8, codes.shape)
        source, target = unsigned(codes).reshape(-1), unsigned(result).reshape(-1)
        for start in range(0, target.size, _CHUNK):
            target[start : start + _CHUNK] = source[start : start + _CHUNK] ^ 0x80
        return result.data

    return LaterArray(DType.I8, codes.shape, made)


def table_fits(table: HostArray, kind: str) -> bool:
    """Whether a file's table F32 [16] is that of the type it names, within 1e-6."""
    return all(abs(a - b) <= 1e-6 for a, b in zip(floats(table), TABLES[kind], strict=True))
