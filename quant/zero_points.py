"""Integer zero points become minima: w = (u - z) * s is s * u + m with m = -s * z in fp32.

The product of an f16 or bf16 scale and an 8-bit zero point is exact in fp32. numpy is imported
when a function is called.
"""

from typing import TYPE_CHECKING

from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.arrays import floats

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def minima(packed: HostArray, scales: HostArray, bits: int) -> HostArray:
    """Return the minima f32 [N, G] of ``scales`` [N, G] (f16, bf16, f32).

    ``packed``: i32 [ceil(N * bits / 32), G], the unsigned zero points of ``bits`` 1..8 packed
    along the rows, lowest bits first; one may straddle two words.
    """
    import numpy as np

    zeros = unpacked_zeros(packed, scales.shape, bits)
    unsigned = np.frombuffer(zeros.data, np.uint8).astype(np.float32)
    return _products(unsigned.reshape(scales.shape), scales)


def unpacked_zeros(packed: HostArray, shape: tuple[int, ...], bits: int) -> HostArray:
    """Return the unsigned zero points u8 [N, G] of ``packed``, as in ``minima``."""
    import numpy as np

    rows, groups = shape
    words = np.frombuffer(packed.data, np.uint32).reshape(packed.shape).astype(np.uint64)
    padded = np.concatenate((words, np.zeros((1, groups), np.uint64)))
    word, bit = np.divmod(np.arange(rows) * bits, 32)
    pairs = padded[word] | padded[word + 1] << np.uint64(32)
    zeros = pairs >> bit.astype(np.uint64)[:, None] & np.uint64(2**bits - 1)
    host = empty(DType.U8, (rows, groups))
    np.frombuffer(host.data, np.uint8).reshape(rows, groups)[...] = zeros
    return host


def signed_minima(zeros: HostArray, scales: HostArray) -> HostArray:
    """Return the minima f32 [N, G] for zero points i8 [N, G] of signed codes stored as q + 128."""
    import numpy as np

    unsigned = np.frombuffer(zeros.data, np.int8).astype(np.float32) + np.float32(128)
    return _products(unsigned.reshape(scales.shape), scales)


def _products(zeros: "npt.NDArray[np.float32]", scales: HostArray) -> HostArray:
    import numpy as np

    out = empty(DType.F32, scales.shape)
    with np.errstate(over="ignore"):  # whoever reads the file refuses what is not finite
        np.multiply(floats(scales), -zeros, out=floats(out))
    return out
