"""The search: the library against torch, what no search may break, and its bounds."""

import itertools
import struct
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.errors import ModelFileError
from llmrun.kernels.cpu import quantize as native
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.host import DType, HostArray
from llmrun.quant import search_reference
from llmrun.quant.compensation import NOTHING, Prepared, prepare
from llmrun.quant.inputs import WIDEST_BLOCK, Inputs
from llmrun.quant.nl4 import LEVELS, table
from llmrun.quant.search import Grid, Searched, effort, results, search

FLOATS = (DType.BF16, DType.F16, DType.F32)
needs_library = pytest.mark.skipif(problem() is not None, reason="no native library")


def levels_for(grid: Grid) -> HostArray | None:
    return table(LEVELS) if grid is Grid.TABLE else None


def parts(found: Searched) -> tuple[bytes, ...]:
    arrays = (found.codes, found.scales, found.zeros)
    return tuple(b"" if array is None else bytes(array.data) for array in arrays)


@pytest.fixture(scope="module")
def known(oracle: SimpleNamespace) -> Prepared:
    """Inputs of 384 columns that depend on each other, in two blocks."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((900, 384)) @ rng.standard_normal((384, 384)) * rng.random(384)
    gram = (x.T @ x / len(x)).astype(np.float32)
    importance = np.diagonal(gram) / np.diagonal(gram).mean()
    blocks = tuple(oracle.make(gram[a:b, a:b].copy()) for a, b in ((0, 256), (256, 384)))
    return prepare(Inputs(900, oracle.make(importance.copy()), blocks))


@pytest.fixture(scope="module")
def odd(oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]) -> Callable[..., HostArray]:
    """Rows of all sizes and kinds, more than a panel of 64 and no multiple of 16."""

    def make(dtype: DType, rows: int = 69) -> HostArray:
        values = gaussian(rows, 384).astype(np.float64)
        values[1, :64] = 0
        values[2] *= 1e-30
        values[3] = np.abs(values[3])
        values[4] *= 1e-37
        values[5] *= 1e30
        values[6] = -np.abs(values[6]) - 1
        values[7] = 0.37
        values[8, 5] = 60000
        values[9] = np.rint(values[9] * 100)
        limit = 65504 if dtype is DType.F16 else 3e38
        return oracle.make(np.clip(values, -limit, limit).astype(np.float32), dtype)

    return make


@needs_library
@pytest.mark.parametrize("how", ["nothing", "importance", "both", "factors"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("grid", Grid)
def test_the_library_and_torch_give_the_same_bytes(
    grid: Grid, dtype: DType, how: str, known: Prepared, odd: Callable[..., HostArray]
) -> None:
    inputs = {
        "nothing": NOTHING,
        "importance": Prepared(known.importance),
        "both": known,
        "factors": Prepared(None, known.factors),
    }[how]
    rows = 21 if inputs.factors else 69  # torch goes column by column there
    group = 32 if dtype is DType.BF16 else 64 if dtype is DType.F16 else 128
    host = odd(dtype, rows)
    ours = search(host, grid, group, inputs, levels_for(grid))
    theirs = search_reference.search(host, grid, group, inputs, levels_for(grid))
    assert parts(ours) == parts(theirs)


@needs_library
@pytest.mark.parametrize("grid", Grid)
def test_q020_same_bytes_for_every_instruction_set_and_number_of_threads(
    grid: Grid, known: Prepared, odd: Callable[..., HostArray]
) -> None:
    host = odd(DType.BF16, 200)
    usable = [isa for isa in ("base", "avx2", "avx512") if has(isa)]
    assert "base" in usable
    made = set()
    for isa, threads in itertools.product(usable, (1, 2, 3)):
        found, how = results(host, grid, 64), effort(grid, known)
        bad = native.search(
            host,
            found.codes,
            found.scales,
            found.zeros,
            grid=grid.value,
            group=64,
            ends=how.ends,
            refits=how.refits,
            importance=known.importance,
            table=levels_for(grid),
            factors=known.factors,
            threads=threads,
            isa=isa,
        )
        assert bad is None
        made.add(parts(found))
    assert made == {parts(search(host, grid, 64, known, levels_for(grid)))}


def has(isa: str) -> bool:
    from llmrun.kernels.cpu.library import usable_isas

    return isa in usable_isas()


@pytest.mark.parametrize("grid", Grid)
def test_same_bytes_for_any_block_size(grid: Grid, odd: Callable[..., HostArray]) -> None:
    host = odd(DType.BF16, 10)
    made = {
        parts(search_reference.search(host, grid, 32, NOTHING, levels_for(grid), size))
        for size in (1, 384, 1000, 1 << 20)
    }
    assert len(made) == 1


@pytest.mark.parametrize("how", [search, search_reference.search], ids=["library", "torch"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_q012_the_first_weight_that_is_not_finite_is_named(
    dtype: DType, bad: float, how: Callable[..., Searched], oracle: SimpleNamespace
) -> None:
    values = np.ones((600, 128), np.float32)
    values[300, 70], values[301, 0], values[599, 1] = bad, bad, bad
    host = oracle.make(values, DType.F32) if dtype is DType.F32 else oracle.make(values, dtype)
    if dtype is DType.BF16:  # the oracle rounds finite numbers only
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
        host = HostArray(dtype, values.shape, memoryview(bytearray(raw.tobytes())))
    for grid in Grid:
        with pytest.raises(ModelFileError, match=rf"\[300, 70\] is {bad}"):
            how(host, grid, 32, NOTHING, levels_for(grid))


def test_inputs_of_another_width_are_refused(
    known: Prepared, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(2, 256))
    with pytest.raises(ValueError, match="for 256 columns"):
        search(host, Grid.INT4, 32, Prepared(known.importance))
    with pytest.raises(ValueError, match="for 256 columns"):
        search(host, Grid.INT4, 32, Prepared(None, known.factors))


def test_blocks_wider_than_the_library_has_memory_for_are_refused(
    oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    width = WIDEST_BLOCK + 128
    factors = (oracle.make(np.eye(width, dtype=np.float32)),)
    with pytest.raises(ValueError, match=f"blocks of .{width}"):
        search(oracle.make(gaussian(1, width)), Grid.INT4, 32, Prepared(None, factors))


@settings(max_examples=60, deadline=None)
@given(
    grid=st.sampled_from(list(Grid)),
    n=st.integers(1, 70),
    chunks=st.integers(1, 4),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(FLOATS),
    tail=st.sampled_from([0.0, 1.0, 3.0]),
    exponent=st.integers(-44, 36),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_q014_errors_are_within_the_analytic_bound(
    grid: Grid,
    n: int,
    chunks: int,
    group: int,
    dtype: DType,
    tail: float,
    exponent: int,
    weighted: bool,
    seed: int,
    oracle: SimpleNamespace,
) -> None:
    """Half a step for every weight inside the grid; for one outside, what is left to the end."""
    rng = np.random.default_rng(seed)
    k = chunks * group
    values = rng.standard_normal((n, k)) * np.exp(tail * rng.standard_normal((n, k)))
    limit = 65504 if dtype is DType.F16 else 3e38
    host = oracle.make(np.clip(values * 10.0**exponent, -limit, limit).astype(np.float32), dtype)
    inputs = Prepared(oracle.make(np.exp(rng.standard_normal(k)))) if weighted else NOTHING
    found = search(host, grid, group, inputs, levels_for(grid))
    scale = oracle.read(found.scales).reshape(-1, 1)
    assert np.isfinite(scale).all()
    assert (scale != 0).all()
    steps = oracle.read(host).reshape(-1, group) / scale
    codes = oracle.read(found.codes).reshape(-1, group * grid.bits // 8)
    if grid.bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(-1, group)
    levels = np.broadcast_to(grid_levels(grid, found, oracle), (len(scale), codes_of(grid)))
    gaps = np.diff(levels, axis=1).max(axis=1, keepdims=True)
    value = np.take_along_axis(levels, codes.astype(int), axis=1)
    beyond = np.maximum(steps - levels[:, -1:], 0) + np.maximum(levels[:, :1] - steps, 0)
    assert (np.abs(steps - value) <= np.maximum(gaps / 2, beyond) * (1 + 1e-5) + 1e-5).all()


def codes_of(grid: Grid) -> int:
    return 256 if grid is Grid.INT8 else 16


def grid_levels(grid: Grid, found: Searched, oracle: SimpleNamespace) -> np.ndarray:
    if grid is Grid.TABLE:
        return np.array([struct.unpack("<16f", table(LEVELS).data)])
    codes = np.arange(codes_of(grid), dtype=float)
    if found.zeros is not None:
        return codes - oracle.read(found.zeros).astype(float).reshape(-1, 1)
    return codes[None] - codes_of(grid) // 2
