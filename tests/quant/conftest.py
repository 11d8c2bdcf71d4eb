"""Host arrays from numpy and back, and numpy's own reading of every storage form (float64)."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmrun.kernels.forms import Dense, Form, Lut16
from llmrun.kernels.host import DType, HostArray

NUMPY = {DType.F32: np.float32, DType.F16: np.float16, DType.U8: np.uint8}


def round_bf16(values: np.ndarray) -> np.ndarray:
    """Round finite float32 to the nearest bfloat16 (half to even), kept in float32."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def make(values: np.ndarray, dtype: DType = DType.F32) -> HostArray:
    """A host array holding ``values`` rounded to ``dtype``."""
    if dtype is DType.BF16:
        raw = (round_bf16(values).view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = np.ascontiguousarray(values).astype(NUMPY[dtype])
    return HostArray(dtype, values.shape, memoryview(bytearray(raw.tobytes())))


def read(array: HostArray) -> np.ndarray:
    """The values of a host array: float64, or uint8 for codes."""
    if array.dtype is DType.U8:
        return np.frombuffer(array.data, np.uint8).reshape(array.shape)
    if array.dtype is DType.BF16:
        wide = np.frombuffer(array.data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(array.shape).astype(np.float64)
    return np.frombuffer(array.data, NUMPY[array.dtype]).reshape(array.shape).astype(np.float64)


def levels(form: Form) -> np.ndarray:
    """The stored codes of a quantized form, [N, K]."""
    codes = read(form.codes)
    if isinstance(form, Lut16) or form.bits == 4:
        return np.stack((codes & 15, codes >> 4), axis=-1).reshape(form.shape)
    return codes


def spread(per_group: HostArray, k: int) -> np.ndarray:
    """Scales or minima, one value per weight."""
    values = read(per_group)
    return np.repeat(values, k // values.shape[1], axis=1)


def decode(form: Form) -> np.ndarray:
    """The weight by the written formulas, in float64."""
    if isinstance(form, Dense):
        return read(form.w)
    scale = spread(form.scales, form.shape[1])
    if isinstance(form, Lut16):
        return scale * read(form.table)[levels(form)]
    if form.mins is None:
        return scale * (levels(form).astype(np.float64) - 2 ** (form.bits - 1))
    if form.mins.dtype is DType.U8:  # zero points
        return scale * (levels(form).astype(np.float64) - spread(form.mins, form.shape[1]))
    return scale * levels(form) + spread(form.mins, form.shape[1])


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    """The functions above."""
    return SimpleNamespace(make=make, read=read, levels=levels, spread=spread, decode=decode)


@pytest.fixture(scope="session")
def gaussian() -> Callable[..., np.ndarray]:
    def draw(n: int, k: int, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return (0.02 * rng.standard_normal((n, k))).astype(np.float32)

    return draw


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
