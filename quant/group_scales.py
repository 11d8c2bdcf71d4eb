"""Scales and zero points of other tools' groups, spread over the groups of storage forms.

Nothing is rounded: scales and zero points keep their bits. numpy is imported on first use.
"""

from llmrun.kernels.forms import ROW
from llmrun.kernels.host import DType, HostArray, LaterArray, empty
from llmrun.quant.arrays import floats, nibbles, unsigned

INT_GROUPS = (128, 64, 32, 16)
LUT_GROUPS = (128, 64, 32)
"""Group sizes of GroupInt and Lut16, widest first."""

_CHUNK_WEIGHTS = 1 << 18


def shared_group(stored: int, k: int, groups: tuple[int, ...] = INT_GROUPS) -> int | None:
    """Return the group of a form that holds K weights in stored groups without loss.

    The widest of ``groups`` that divides both, its scales repeated where the stored group is
    wider; ``ROW`` where one stored group spans the row; else None. K may cut the last one short.
    """
    if stored == ROW:
        return ROW
    fitting = (group for group in groups if stored % group == 0 and k % group == 0)
    return next(fitting, ROW if stored >= k else None)


def scales_and_minima(
    scales: HostArray, zeros: HostArray | None, stored: int, group: int, k: int
) -> tuple[HostArray, HostArray | None]:
    """Return ``scales`` and ``mins`` [N, K / group] of a GroupInt, from [N, G] of stored groups.

    ``zeros``: U8; None for a weight that has none. Beside scales of 16 bits they stay what they
    are; those of F32 get minima, which are F32, too.
    """
    if zeros is None:
        return spread(scales, stored, group, k), None
    mins = zeros if shift_of(scales.dtype.name) == "zero" else minima(scales, zeros)
    return spread(scales, stored, group, k), spread(mins, stored, group, k)


def shift_of(scale_type: str) -> str:
    """What a form makes of zero points beside scales of a type: ``zero`` or ``min``."""
    return "min" if scale_type == DType.F32.name else "zero"


def spread(per_group: HostArray, stored: int, group: int, k: int) -> HostArray:
    """Return values [N, G] of groups of ``stored`` as [N, K / group]; ``group`` is shared."""
    if group in (stored, ROW):
        return per_group
    owners = [start // stored for start in range(0, k, group)]
    result = empty(per_group.dtype, (per_group.shape[0], len(owners)))
    unsigned(result)[...] = unsigned(per_group)[:, owners]
    return result


def minima(scales: HostArray, zeros: HostArray) -> HostArray:
    """Return -s * z, F32, of scales and zero points U8, both [N, G]."""
    import numpy as np

    result = empty(DType.F32, scales.shape)
    with np.errstate(over="ignore"):  # whoever reads the file refuses what is not finite
        np.multiply(floats(scales), unsigned(zeros), out=floats(result), casting="unsafe")
    np.negative(floats(result), out=floats(result))
    return result


def all_equal(zeros: HostArray, value: int) -> bool:
    """Whether every element of a U8 array is ``value``."""
    return bytes(zeros.data).count(value) == zeros.size


def reordered(
    codes: HostArray, bits: int, scales: HostArray, zeros: HostArray, order: HostArray
) -> HostArray:
    """Return the weight F32 [N, K], s * (u - z), whose column k is of group ``order[k]``.

    ``codes``: U8 [N, K * bits / 8] as in GroupInt; ``scales`` and ``zeros`` (U8): [N, G];
    ``order``: I32 [K], from 0 to G - 1. Exact for scales of 16 bits.
    """
    n, k = scales.shape[0], order.size

    def made() -> memoryview:
        import numpy as np

        result = empty(DType.F32, (n, k))
        owners, out, packed = unsigned(order).astype(np.intp), floats(result), unsigned(codes)
        scale, zero = floats(scales), unsigned(zeros).astype(np.float32)
        step = max(1, _CHUNK_WEIGHTS // k)
        own = np.empty((step, k), np.float32)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            part, spread_out = out[rows], own[: rows.stop - start]
            part[...] = packed[rows] if bits == 8 else nibbles(packed[rows])
            # The groups were checked; ``clip`` spares numpy a copy.
            part -= np.take(zero[rows], owners, axis=1, out=spread_out, mode="clip")
            part *= np.take(scale[rows], owners, axis=1, out=spread_out, mode="clip")
        return result.data

    return LaterArray(DType.F32, (n, k), made)
