"""Scale bytes and codes of MXFP4 against powers of two and the bits of a 4-bit float."""

from types import SimpleNamespace

import numpy as np

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.microscaling import LARGEST_EXPONENT, scales, table, too_large


def _exponents(values: object) -> HostArray:
    raw = np.array(values, np.uint8)
    return HostArray(DType.U8, raw.shape, memoryview(bytearray(raw.tobytes())))


def test_a_scale_is_the_exact_power_of_two(oracle: SimpleNamespace) -> None:
    found = scales(_exponents(np.arange(255)), (15, 17))
    assert found.dtype is DType.BF16
    assert np.array_equal(oracle.read(found).reshape(-1), np.exp2(np.arange(255.0) - 127))


def test_codes_are_sign_exponent_and_mantissa(oracle: SimpleNamespace) -> None:
    values = oracle.read(table())
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, code & 1
        size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        assert values[code] == (-size if code & 8 else size)
    assert np.signbit(values[8])


def test_scales_that_overflow_are_found() -> None:
    assert too_large(_exponents([[0, 127], [LARGEST_EXPONENT, 1]])) is None
    assert too_large(_exponents([[0, 127], [LARGEST_EXPONENT + 1, 255]])) == 2
    assert np.isfinite(np.float32(6) * np.float32(2.0 ** (LARGEST_EXPONENT - 127)))
    assert float(np.finfo(np.float32).max) < 6 * 2.0 ** (LARGEST_EXPONENT + 1 - 127)
