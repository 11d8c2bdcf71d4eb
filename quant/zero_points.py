"""Integer zero points as files pack them: w = (u - z) * s, which is s * u + m with m = -s * z.

The product of an f16 or bf16 scale and an 8-bit zero point is exact in fp32; for such scales forms
hold the zero points themselves, for wider ones the minima. numpy is imported when a function is
called.
"""

from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.codes import offset


def unpacked_zeros(packed: HostArray, shape: tuple[int, ...], bits: int) -> HostArray:
    """Return the unsigned zero points u8 [N, G] of a weight.

    ``packed``: i32 [ceil(N * bits / 32), G], zero points of ``bits`` 1..8 packed along the rows,
    lowest bits first; one may straddle two words.
    """
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


def packed_zeros(zeros: HostArray, bits: int) -> HostArray:
    """Return zero points u8 [N, G] below 2**bits as ``unpacked_zeros`` takes them; bits 4 or 8."""
    import numpy as np

    rows, groups = zeros.shape
    per_word = 32 // bits
    words = -(-rows // per_word)
    padded = np.zeros((words * per_word, groups), np.uint32)
    padded[:rows] = np.frombuffer(zeros.data, np.uint8).reshape(rows, groups)
    fields = padded.reshape(words, per_word, groups)
    host = empty(DType.I32, (words, groups))
    out = np.frombuffer(host.data, np.uint32).reshape(words, groups)
    for place in range(per_word):
        out |= fields[:, place] << np.uint32(place * bits)
    return host


def unsigned_zeros(zeros: HostArray) -> HostArray:
    """Return zero points i8 of signed codes as those u8 of the codes stored as q + 128."""
    return offset(zeros.data, zeros.shape)
