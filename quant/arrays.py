"""Host arrays as numpy arrays, without copies; numpy is imported on first use.

bf16, which numpy lacks, is moved as integers of its width and widened for arithmetic.
"""

from typing import TYPE_CHECKING

from llmrun.kernels.host import DType, HostArray

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Unsigned = NDArray[np.unsignedinteger]
    Floats = NDArray[np.float32]


def unsigned(host: HostArray) -> "Unsigned":
    """View elements of any type as unsigned integers of their width: to move them."""
    import numpy as np

    flat: Unsigned = np.frombuffer(host.data, f"<u{host.dtype.bits // 8}")
    return flat.reshape(host.shape)


def floats(host: HostArray) -> "Floats":
    """Return F32 (a view), F16 or BF16 elements as fp32; both widenings are exact."""
    import numpy as np

    if host.dtype is DType.BF16:
        wide = np.frombuffer(host.data, "<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(host.shape)
    stored = {DType.F32: "<f4", DType.F16: "<f2"}[host.dtype]
    flat = np.frombuffer(host.data, stored).astype(np.float32, copy=False)
    return flat.reshape(host.shape)


def first_overflow(scales: HostArray, largest: float) -> int | None:
    """Return the flat index of the first scale that is not finite times ``largest``, or None."""
    import numpy as np

    with np.errstate(over="ignore"):
        bad = ~np.isfinite(floats(scales).ravel() * np.float32(largest))
    return int(bad.argmax()) if bad.any() else None


def nibbles(codes: "Unsigned") -> "Unsigned":
    """Unpack bytes [N, K / 2] to [N, K]: the low nibble is the even k."""
    import numpy as np

    return np.stack((codes & 15, codes >> 4), axis=-1).reshape(codes.shape[0], -1)
