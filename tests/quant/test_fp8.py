"""Eight-bit floats against torch's own: every code, every kind of block."""

import numpy as np
import pytest
import torch

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.fp8 import decode, dense_dtype, first_nan, powers, values


def _host(tensor: torch.Tensor, dtype: DType) -> HostArray:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return HostArray(dtype, tuple(tensor.shape), memoryview(bytearray(raw)))


def _floats(host: HostArray) -> torch.Tensor:
    dtype = {DType.F32: torch.float32, DType.BF16: torch.bfloat16}[host.dtype]
    return torch.frombuffer(host.data, dtype=dtype).view(host.shape).float()


ALL = torch.arange(256, dtype=torch.uint8)


def test_all_256_values_are_torchs() -> None:
    expected = ALL.view(torch.float8_e4m3fn).float()
    found = torch.from_numpy(values())
    finite = ~expected.isnan()
    assert torch.equal(found[finite].view(torch.int32), expected[finite].view(torch.int32))
    assert int(found.isnan().sum()) == 2


def test_all_256_powers_are_torchs() -> None:
    expected = ALL.view(torch.float8_e8m0fnu).float()
    found = _floats(powers(_host(ALL, DType.U8)))
    assert torch.equal(found[:255], expected[:255])
    assert found[255].isnan()


@pytest.mark.parametrize("shape", [(1, 1), (5, 48), (130, 257), (3000, 512)])
@pytest.mark.parametrize("block", [(1, 16), (128, 128), (2, 1000), (1000, 3), (10_000, 10_000)])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16])
def test_decoding_is_one_fp32_product(
    shape: tuple[int, int], block: tuple[int, int], scale: torch.dtype
) -> None:
    n, k = shape
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 127, shape, generator=generator).to(torch.uint8)
    codes += 128 * torch.randint(0, 2, shape, generator=generator).to(torch.uint8)
    grid = (-(-n // block[0]), -(-k // block[1]))
    scales = torch.randn(grid, generator=generator).to(scale)
    wide = scales.float().repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    names = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
    found = decode(_host(codes, DType.U8), _host(scales, names[scale]), block)
    assert torch.equal(_floats(found), codes.view(torch.float8_e4m3fn).float() * wide)


def test_powers_of_two_are_exact_in_bf16() -> None:
    codes = ALL[ALL & 127 != 127].view(2, 127)
    scales = torch.tensor([[2.0**-40], [-(2.0**30)]])
    host = _host(scales, DType.F32)
    assert dense_dtype(host) is DType.BF16
    found = decode(_host(codes, DType.U8), host, (1, 127), DType.BF16)
    assert torch.equal(_floats(found), codes.view(torch.float8_e4m3fn).float() * scales)


@pytest.mark.parametrize("scale", [1.5, 2.0**-120, 2.0**110, 1 + 2.0**-20])
def test_other_scales_need_fp32(scale: float) -> None:
    scales = torch.tensor([1.0, 0.0, scale])
    assert dense_dtype(_host(scales, DType.F32)) is DType.F32


@pytest.mark.parametrize("index", [0, 2, (1 << 20) + 7])
@pytest.mark.parametrize("code", [127, 255])
def test_the_first_nan_is_found(index: int, code: int) -> None:
    codes = np.full(1 << 21, 126, np.uint8)
    host = HostArray(DType.U8, codes.shape, memoryview(codes))
    assert first_nan(host) is None
    codes[[index, -1]] = code
    assert first_nan(host) == index
