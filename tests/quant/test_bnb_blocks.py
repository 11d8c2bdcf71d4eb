"""bitsandbytes' blocks against its own tables and functions, and formulas written out."""

from types import SimpleNamespace

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch

from llmrun.kernels.host import DType
from llmrun.quant.bnb_blocks import (
    TABLES,
    nested_scales,
    row_scales,
    scales_of_groups,
    straddling,
    swapped,
    table_fits,
)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_tables_are_the_library_s(kind: str) -> None:
    library = bnb.get_4bit_type(kind, device="cpu")
    assert torch.equal(torch.tensor(TABLES[kind], dtype=torch.float32), library)


def test_a_table_fits_within_a_millionth(oracle: SimpleNamespace) -> None:
    values = np.array(TABLES["nf4"], np.float32)
    assert table_fits(oracle.make(values), "nf4")
    assert not table_fits(oracle.make(values), "fp4")
    assert table_fits(oracle.make(values + np.float32(5e-7)), "nf4")
    values[4] += np.float32(2e-6)
    assert not table_fits(oracle.make(values), "nf4")
    values[4] = np.nan
    assert not table_fits(oracle.make(values), "nf4")


def test_nibbles_are_swapped(oracle: SimpleNamespace) -> None:
    packed = oracle.make(np.array([0x12, 0xF0, 0x0F, 0xAB]), DType.U8)
    found = swapped(packed, (2, 2))
    assert found.shape == (2, 2)
    assert bytes(found.data) == bytes([0x21, 0x0F, 0xF0, 0xBA])


def test_nested_scales_equal_the_library(oracle: SimpleNamespace) -> None:
    absmax = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 0.1
    offset = absmax.mean()
    codes, state = bnb.quantize_blockwise(absmax - offset, blocksize=256)
    expected = bnb.dequantize_blockwise(codes, state) + offset
    table, outer = (oracle.make(part.numpy()) for part in (state.code, state.absmax))
    stored = oracle.make(codes.numpy(), DType.U8)
    found = nested_scales(stored, table, outer, 256, offset.item())
    assert found.dtype is DType.F32
    assert np.array_equal(oracle.read(found), expected.double().numpy())


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_nested_scales_may_overflow_without_a_warning(oracle: SimpleNamespace) -> None:
    codes = oracle.make(np.zeros(3, np.uint8), DType.U8)
    table, outer = (oracle.make(np.full(n, 3e38, np.float32)) for n in (256, 1))
    assert np.isinf(oracle.read(nested_scales(codes, table, outer, 256, 0.0))).all()


@pytest.mark.parametrize(("block", "group"), [(64, 64), (64, 32), (256, 128)])
def test_a_scale_for_each_group(block: int, group: int, oracle: SimpleNamespace) -> None:
    n, k = 5, 384
    absmax = np.arange(-(-n * k // block), dtype=np.float32)
    found = scales_of_groups(oracle.make(absmax), block, group, (n, k))
    owners = np.arange(0, n * k, group) // block
    assert np.array_equal(oracle.read(found), absmax[owners].reshape(n, -1))


@pytest.mark.parametrize(("n", "k", "block"), [(3, 7, 2), (5, 33, 64), (1031, 1031, 4096)])
def test_straddling_blocks(n: int, k: int, block: int, oracle: SimpleNamespace) -> None:
    rng = np.random.default_rng(n)
    count = n * k
    codes = rng.integers(0, 16, count + count % 2)
    packed = oracle.make((codes[0::2] << 4 | codes[1::2]), DType.U8)
    table = oracle.make(np.array(TABLES["nf4"], np.float32))
    absmax = rng.standard_normal(-(-count // block)).astype(np.float32)
    found = straddling(packed, table, oracle.make(absmax), block, (n, k))
    values = np.array(TABLES["nf4"], np.float32)[codes[:count]]
    expected = values * absmax[np.arange(count) // block]
    assert np.array_equal(oracle.read(found), expected.reshape(n, k).astype(np.float64))


def test_row_scales_are_divided_in_fp32(oracle: SimpleNamespace) -> None:
    absmax = np.array([1.0, 0.3, 0.0, 127.0], np.float32)
    found = row_scales(oracle.make(absmax))
    assert found.shape == (4, 1)
    assert np.array_equal(oracle.read(found)[:, 0], (absmax / np.float32(127)).astype(np.float64))
