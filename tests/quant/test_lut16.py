"""nf4 and fp4 against bitsandbytes' own dequantization: equal, not close."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmrun.kernels.host import DType
from llmrun.quant.lut16 import parts
from llmrun.quant.scheme import find

bitsandbytes_functional = pytest.importorskip("bitsandbytes.functional", reason="no bitsandbytes")

NF4 = (
    "-1 -.6961928 -.52507305 -.3949175 -.28444138 -.18477343 -.091050036 0 .0795803 .1609302 "
    ".2461123 .33791524 .44070983 .562617 .72295684 1"
)
FP4 = "0 .0625 8 12 4 6 2 3 -0 -.0625 -8 -12 -4 -6 -2 -3"
TORCH = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (3, 32), (65, 160), (16, 512)])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_r105_equals_bitsandbytes(
    kind: str,
    shape: tuple[int, ...],
    dtype: DType,
    oracle: SimpleNamespace,
    gaussian: Callable[..., np.ndarray],
) -> None:
    """Also where blocks of 64 straddle rows and where the last one is short."""
    values = gaussian(*shape, seed=shape[0])
    values[0, :32] = 0
    host = oracle.make(values, dtype)
    # Flattened: bitsandbytes' CPU dequantizer takes the wrong absmax for rows of 96.
    flat = torch.from_numpy(oracle.read(host)).to(TORCH[dtype]).flatten()
    packed, state = bitsandbytes_functional.quantize_4bit(flat, blocksize=64, quant_type=kind)
    state.dtype = torch.float32
    theirs = bitsandbytes_functional.dequantize_4bit(packed, state).reshape(shape).numpy()
    form = find(kind).quantize(host)
    assert form.group == (64 if shape[1] % 64 == 0 else 32)
    assert (oracle.decode(form).astype(np.float32) == theirs).all()


@pytest.mark.parametrize("shape", [(3, 32), (65, 160), (300, 128)])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_q018_double_quantization_equals_bitsandbytes(
    kind: str,
    shape: tuple[int, ...],
    oracle: SimpleNamespace,
    gaussian: Callable[..., np.ndarray],
) -> None:
    """The weights, and every array that a checkpoint holds; over 256 blocks: two nested ones."""
    values = gaussian(*shape, seed=shape[0])
    values[0, :32] = 0
    host = oracle.make(values, DType.BF16)
    flat = torch.from_numpy(oracle.read(host)).bfloat16().flatten()
    packed, state = bitsandbytes_functional.quantize_4bit(
        flat, blocksize=64, quant_type=kind, compress_statistics=True
    )
    state.dtype = torch.float32
    theirs = bitsandbytes_functional.dequantize_4bit(packed, state).reshape(shape).numpy()
    form = find(f"{kind}-dq").quantize(host)
    assert (oracle.decode(form).astype(np.float32) == theirs).all()
    made = parts(host, kind, nested=True)
    assert made.nested is not None
    assert bytes(made.codes.data) == packed.numpy().tobytes()
    assert bytes(made.nested.codes.data) == state.absmax.numpy().tobytes()
    assert bytes(made.nested.absmax.data) == state.state2.absmax.numpy().tobytes()
    assert bytes(made.nested.table.data) == state.state2.code.numpy().tobytes()
    assert made.nested.offset == state.offset.item()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_nearest_entry_is_taken(
    kind: str, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(33, 192), DType.BF16)
    form = find(kind).quantize(host)
    entries = oracle.spread(form.scales, 192)[..., None] * oracle.read(form.table)
    distance = np.abs(entries - oracle.read(host)[..., None])
    chosen = np.take_along_axis(distance, oracle.levels(form)[..., None].astype(int), -1)[..., 0]
    assert (chosen <= distance.min(axis=-1) + 1e-9).all()


def test_the_tables_are_the_documented_ones(
    oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(1, 64))
    nf4 = oracle.read(find("nf4").quantize(host).table)
    assert (nf4 == np.array(NF4.split(), dtype=np.float32)).all()
    fp4 = oracle.read(find("fp4").quantize(host).table)
    assert np.allclose(fp4, np.array(FP4.split(), dtype=np.float64) / 12, rtol=1e-3, atol=0)


def test_scales_are_the_largest_magnitudes(
    oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(5, 128), DType.F16)
    scales = oracle.read(find("nf4").quantize(host).scales)
    assert (scales == np.abs(oracle.read(host)).reshape(5, 2, 64).max(axis=2)).all()
