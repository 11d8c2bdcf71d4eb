"""Whether stored floats are finite, by looking at their bytes; nothing is computed with them.

The exponent bits of a NaN or an infinity are all ones. Slicing out the high bytes finds the few
candidates at about a gigabyte a second without any array library.
"""

from llmrun.kernels.forms import Form
from llmrun.kernels.host import DType, HostArray

_CHUNK = 8 << 20
# Per dtype: element bytes, mask of the exponent bits in the top byte and in the one below it.
_EXPONENT = {
    DType.F16: (2, 0x7C, 0x00),
    DType.BF16: (2, 0x7F, 0x80),
    DType.F32: (4, 0x7F, 0x80),
    DType.F64: (8, 0x7F, 0xF0),
}


def first_nonfinite(array: HostArray) -> int | None:
    """Return the flat index of the first NaN or infinity; None if all are finite or integers."""
    if array.dtype not in _EXPONENT:
        return None
    width, top, below = _EXPONENT[array.dtype]
    suspects = bytes(byte for byte in range(256) if byte & top == top)
    others = bytes(byte for byte in range(256) if byte & top != top)
    for start in range(0, array.nbytes, _CHUNK):
        chunk = bytes(array.data[start : start + _CHUNK])
        high = chunk[width - 1 :: width]
        if not high.translate(None, others):
            continue
        for index, byte in enumerate(high):
            if byte in suspects and chunk[index * width + width - 2] & below == below:
                return start // width + index
    return None


def nonfinite_part(form: Form) -> tuple[str, int] | None:
    """Return the part of a form (``scales``, ...) that is not finite and the flat index there."""
    for part, array in form.arrays.items():
        index = first_nonfinite(array)
        if index is not None:
            return part, index
    return None
