"""Integer codes as files hold them, brought into the code bytes of GroupInt; no value changes.

numpy is imported when a function is called.
"""

from typing import TYPE_CHECKING

from llmrun.kernels.host import DType, HostArray, empty

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_CHUNK = 1 << 13
"""Eights of codes taken at a time, so that what is worked on stays in the processor's cache."""


def container_bits(bits: int) -> int:
    """Return the width in which codes of ``bits`` 2..8 are kept in memory: 4 or 8."""
    return 4 if bits <= 4 else 8


def unpacked(stream: memoryview, bits: int, shape: tuple[int, int], *, shift: bool) -> HostArray:
    """Widen a stream of unsigned ``bits``-wide codes to the 4- or 8-bit codes of GroupInt.

    ``stream``: N * K codes one after another, lowest bits first; K is a multiple of 8. ``shift``
    moves the middle of the range, 2**(bits - 1), to that of the container, for symmetric codes.
    """
    import numpy as np

    n, k = shape
    container = container_bits(bits)
    move = 2 ** (container - 1) - 2 ** (bits - 1) if shift else 0
    eights = np.frombuffer(stream, np.uint8).reshape(-1, bits)
    host = empty(DType.U8, (n, k * container // 8))
    out = np.frombuffer(host.data, np.uint8).reshape(-1, container)
    for start in range(0, len(eights), _CHUNK):
        part = slice(start, start + _CHUNK)
        _unpack(eights[part], out[part], bits, move)
    return host


def _unpack(
    eights: "npt.NDArray[np.uint8]", out: "npt.NDArray[np.uint8]", bits: int, move: int
) -> None:
    """Fill ``out`` [E, 4 or 8], the bytes of eight codes each, from ``eights`` [E, bits]."""
    for index in range(8):
        byte, bit = divmod(index * bits, 8)
        code = eights[:, byte] >> bit
        if bit + bits > 8:
            code |= eights[:, byte + 1] << (8 - bit)
        code &= 2**bits - 1
        code += move
        if out.shape[1] == 8:
            out[:, index] = code
        elif index % 2:
            out[:, index // 2] |= code << 4
        else:
            out[:, index // 2] = code


def offset(signed: memoryview, shape: tuple[int, ...]) -> HostArray:
    """Return i8 [N, K] as u8 codes q + 128."""
    import numpy as np

    host = empty(DType.U8, shape)
    source = np.frombuffer(signed, np.uint8)
    np.bitwise_xor(source, np.uint8(128), out=np.frombuffer(host.data, np.uint8))
    return host
