"""Eight-bit floats: what E4M3 codes with a scale per block of the matrix stand for.

E4M3 is the kind without infinities (``e4m3fn``): 1, 4 and 3 bits, largest value 448, NaN where all
lower bits are ones. No storage form holds it, so a weight is opened to a dense one: value times
scale, rounded once in fp32, and exact there if the scale has 16 bits. Scales may themselves be
eight-bit powers of two (E8M0). Scheme int8 made from that adds 0.004 % of relative squared error
(Gaussian weights, 0.009 % with heavy tails) to the 0.07 % that E4M3 itself has. numpy is imported
when a function is called.
"""

from typing import TYPE_CHECKING

from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.arrays import floats

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LARGEST = 448.0
_PANEL = 1 << 16
"""Weights taken at a time, so that what is worked on stays in the processor's cache."""


def values() -> "npt.NDArray[np.float32]":
    """Return the 256 values of E4M3 by code, fp32; codes 127 and 255 are NaN."""
    import numpy as np

    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    normal = np.ldexp(8.0 + fraction, exponent - 10)
    magnitude = np.where(exponent == 0, np.ldexp(fraction.astype(float), -9), normal)
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


def powers(codes: HostArray) -> HostArray:
    """Return E8M0 codes u8 as F32 of the same shape: 2**(code - 127), NaN for 255."""
    import numpy as np

    exponents = np.frombuffer(codes.data, np.uint8).astype(np.int32)
    scales = np.ldexp(np.float32(1), np.minimum(exponents, 254) - 127)
    scales[exponents == 255] = np.nan
    return HostArray(DType.F32, codes.shape, memoryview(bytearray(scales.tobytes())))


def first_nan(codes: HostArray) -> int | None:
    """Return the flat index of the first E4M3 code u8 that is a NaN, or None."""
    import numpy as np

    flat = np.frombuffer(codes.data, np.uint8)
    for start in range(0, flat.size, _PANEL):
        found = flat[start : start + _PANEL] & 127 == 127
        if found.any():
            return start + int(found.argmax())
    return None


def dense_dtype(scales: HostArray) -> DType:
    """Return BF16 if every product is exact in it, which takes powers of two; else F32."""
    import numpy as np

    fraction, exponent = np.frexp(np.abs(floats(scales)))
    exact = (fraction == 0) | ((fraction == 0.5) & (abs(exponent) <= 100))
    return DType.BF16 if exact.all() else DType.F32


def decode(
    codes: HostArray, scales: HostArray, block: tuple[int, int], dtype: DType = DType.F32
) -> HostArray:
    """Return the weight [N, K] in ``dtype``: F32, or BF16 where ``dense_dtype`` says so.

    ``codes``: u8 [N, K]. ``scales``: [ceil(N / rows), ceil(K / columns)] for a ``block`` of (rows,
    columns), F32, F16 or BF16.
    """
    import numpy as np

    n, k = codes.shape
    rows, columns = block
    table, grid = values(), floats(scales)
    source = np.frombuffer(codes.data, np.uint8).reshape(n, k)
    host = empty(dtype, (n, k))
    wide = np.frombuffer(host.data, np.float32).reshape(n, k) if dtype is DType.F32 else None
    narrow = np.frombuffer(host.data, np.uint16).reshape(n, -1)
    step = max(1, _PANEL // k)
    own = np.empty((step, k), np.float32)
    for start in range(0, n, step):
        end = min(start + step, n)
        panel = own[: end - start] if wide is None else wide[start:end]
        # Without a mode, take works in a copy: three times as long.
        np.take(table, source[start:end], out=panel, mode="clip")
        _multiply(panel, grid[np.arange(start, end) // rows], columns)
        if wide is None:
            narrow[start:end] = panel.view(np.uint32) >> 16
    return host


def _multiply(
    panel: "npt.NDArray[np.float32]", scale: "npt.NDArray[np.float32]", columns: int
) -> None:
    """Scale a panel [R, K] in place by ``scale`` [R, ceil(K / columns)]."""
    import numpy as np

    n, k = panel.shape
    if scale.shape[1] == 1:
        panel *= scale
    elif k % columns == 0:
        blocks = panel.reshape(n, -1, columns)
        blocks *= scale[:, :, None]
    else:
        panel *= np.repeat(scale, columns, axis=1)[:, :k]
