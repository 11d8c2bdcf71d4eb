"""NVFP4: four-bit floats (E2M1) in groups of 16 with E4M3 scales and one scale for all.

Twice an E2M1 value is an integer from -12 to 12, so the weight is an 8-bit GroupInt with half the
scale: no value changes. numpy is imported when a function is called.
"""

from llmrun.kernels.forms import GroupInt
from llmrun.kernels.host import DType, HostArray, LaterArray, empty
from llmrun.quant.arrays import floats
from llmrun.quant.fp8 import values

GROUP = 16
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)


def group_int(packed: HostArray, scales: HostArray, common: HostArray) -> GroupInt:
    """Return the weight w = E2M1 * (scale / common).

    ``packed``: u8 [N, K / 2], low nibble first. ``scales``: E4M3 codes u8 [N, K / 16]. ``common``:
    F32 [1].
    """
    import numpy as np

    n, k = packed.shape[0], 2 * packed.shape[1]

    def codes() -> memoryview:
        signed = np.array(_DOUBLED + tuple(-value for value in _DOUBLED)) + 128
        pairs = (signed[None, :] | signed[:, None] << 8).astype(np.uint16).ravel()
        host = empty(DType.U8, (n, k))
        out = np.frombuffer(host.data, np.uint16)
        np.take(pairs, np.frombuffer(packed.data, np.uint8), out=out, mode="clip")
        return host.data

    halved = empty(DType.F32, scales.shape)
    view = floats(halved)
    stored = values()[np.frombuffer(scales.data, np.uint8)].reshape(scales.shape)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        np.divide(stored, floats(common), out=view)
    view *= np.float32(0.5)
    return GroupInt(8, GROUP, LaterArray(DType.U8, (n, k), codes), halved, None, (n, k))
