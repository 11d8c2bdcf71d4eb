"""Packing: every column of every row in its place in the panel, wherever the rows come from."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from llmrun.errors import ModelFileError, UnavailableError
from llmrun.kernels.cpu import abi, weights
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.cpu.memory import Arena
from llmrun.kernels.cpu.weights import CpuWeight, Packer
from llmrun.kernels.forms import ROW, Dense, Form, GroupInt, Lut16, rows
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.gguf_blocks import BLOCK_TYPES, unblock

pytestmark = pytest.mark.skipif(problem() is not None, reason=f"no native library: {problem()}")
RNG = np.random.default_rng(0)
SHAPES = [(1, 32), (16, 64), (17, 96), (50, 160), (33, 4096)]


def host(dtype: DType, values: np.ndarray) -> HostArray:
    data = memoryview(bytearray(values.tobytes()))
    return HostArray(dtype, (values.shape[0], values.nbytes * 8 // dtype.bits // len(values)), data)


def group_int(bits: int, group: int, shape: tuple[int, int], mins: bool) -> GroupInt:
    n, k = shape
    codes = host(DType.U8, RNG.integers(0, 256, (n, k * bits // 8), np.uint8))
    scales, low = (
        host(DType.F16, RNG.standard_normal((n, k // (group or k))).astype(np.float16))
        for _ in range(2)
    )
    return GroupInt(bits, group, codes, scales, low if mins else None, shape)


def packed(form: Form, threads: int = 2) -> tuple[CpuWeight, Arena]:
    arena = Arena(huge=False)
    packer = Packer(arena, threads)
    weight = packer.add(form)
    packer.finish()
    return weight, arena


def memory(address: int, dtype: type, *shape: int) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)


def levels(form: GroupInt | Lut16) -> np.ndarray:
    """Codes u8 [N, K] as they are packed: those of four bits in groups of 16 are widened."""
    codes = np.frombuffer(form.codes.data, np.uint8).reshape(form.shape[0], -1)
    if isinstance(form, GroupInt) and form.bits == 8:
        return codes
    codes = np.stack((codes & 15, codes >> 4), -1).reshape(form.shape)
    return codes + (120 if form.group == 16 and form.arrays.get("mins") is None else 0)


def unpacked(weight: CpuWeight) -> np.ndarray:
    """Codes u8 [padded rows, padded columns], as abi.h describes the panels."""
    w = weight.native
    if w.kind == abi.W8:
        panels = memory(w.codes, np.uint8, w.panels, w.k_padded // 4, 16, 4)
        return panels.transpose(0, 2, 1, 3).reshape(-1, w.k_padded)
    tiles = memory(w.codes, np.uint8, w.panels, w.k_padded // 8, 16, 4)
    both = np.stack((tiles & 15, tiles >> 4), -2)  # [panel, word, row, nibble, b]
    return both.transpose(0, 2, 1, 3, 4).reshape(-1, w.k_padded)


def columns(address: int, weight: CpuWeight, like: HostArray) -> np.ndarray:
    """Scales, minima or zero points [N, groups]; what they are padded with must be zero."""
    w = weight.native
    panels = memory(address, number(like), w.panels, w.k_padded // w.group, 16)
    rows_first = panels.transpose(0, 2, 1).reshape(w.panels * 16, -1)
    assert not rows_first[w.n :].any()
    return rows_first[: w.n]


def assert_packed(form: GroupInt | Lut16, weight: CpuWeight) -> None:
    n, k = form.shape
    found = unpacked(weight)
    assert np.array_equal(found[:n, :k], levels(form))
    padding = 128 if weight.native.kind == abi.W8 else 8
    assert (found[n:] == padding).all()
    assert (found[:, k:] == padding).all()
    for name in ("scales", "mins"):
        array = form.arrays.get(name)
        if array is not None:
            expected = np.frombuffer(array.data, number(array)).reshape(n, -1)
            assert np.array_equal(columns(getattr(weight.native, name), weight, array), expected)


def number(array: HostArray) -> type:
    return np.uint8 if array.dtype is DType.U8 else np.uint16


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "group", "mins"), [(4, 32, True), (8, 32, False), (8, ROW, True)])
def test_codes_and_scales(
    bits: int, group: int, mins: bool, shape: tuple[int, int], threads: int
) -> None:
    form = group_int(bits, group, shape, mins)
    weight, _arena = packed(form, threads)
    assert_packed(form, weight)


def zero_points(form: GroupInt) -> GroupInt:
    assert form.mins is not None
    zeros = RNG.integers(0, 256, form.mins.shape, np.uint8)
    return replace(form, mins=host(DType.U8, zeros))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 16), (8, 32), (8, ROW)])
def test_zero_points(bits: int, group: int, shape: tuple[int, int]) -> None:
    form = zero_points(group_int(bits, group, shape, mins=True))
    weight, _arena = packed(form)
    assert weight.kind == form.kind.replace("int4 g16", "int8 g16")
    w = weight.native
    assert w.min_type == abi.U8
    code_bytes = w.k_padded if w.kind == abi.W8 else w.k_padded // 2
    assert weight.nbytes == w.panels * 16 * (code_bytes + w.k_padded // w.group * 3)
    assert_packed(form, weight)


@pytest.mark.parametrize("shape", [(18, 36), (3, 100), (16, 7)])
def test_whole_rows_are_padded(shape: tuple[int, int]) -> None:
    form = group_int(8, ROW, shape, mins=True)
    weight, _arena = packed(form)
    assert weight.native.k_padded >= shape[1]
    assert_packed(form, weight)


def test_a_table() -> None:
    form = group_int(4, 64, (20, 128), mins=False)
    table = host(DType.F32, RNG.standard_normal((16, 1)).astype(np.float32))
    table = HostArray(DType.F32, (16,), table.data)
    lut = Lut16(64, form.codes, table, form.scales, form.shape)
    weight, _arena = packed(lut)
    assert_packed(lut, weight)
    assert ctypes.string_at(weight.native.table, 64) == bytes(table.data)


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
LEVELS = {
    "integers": (IQ4, (1.0, IQ4)),
    "halves": (E2M1, (0.5, tuple(int(2 * entry) for entry in E2M1))),
    "a large unit": ((-48, 32, 16, 0) * 4, (16.0, (-3, 2, 1, 0) * 4)),
    "both ends": ((-128, 127) * 8, (1.0, (-128, 127) * 8)),
    "nothing": ((0.0, -0.0) * 8, (1.0, (0,) * 16)),
    "128": ((128, 1) * 8, None),
    "thirds": ((1 / 3, 1) * 8, None),
    "too fine": ((1, 1 + 2**-8) * 8, None),
    "far from 1": ((2.0**-65,) * 16, None),
    "infinite": ((float("inf"), 1) * 8, None),
    "no number": ((float("nan"), 1) * 8, None),
}


@pytest.mark.parametrize("name", LEVELS)
def test_levels_of_a_table(name: str) -> None:
    entries, wanted = LEVELS[name]
    table = host(DType.F32, np.array(entries, np.float32))
    assert weights.integer_levels(HostArray(DType.F32, (16,), table.data)) == wanted


@pytest.mark.parametrize("exact", [False, True])
def test_a_table_of_integers(exact: bool) -> None:
    form = group_int(4, 32, (20, 128), mins=False)
    table = host(DType.F32, np.array(E2M1, np.float32))
    lut = Lut16(32, form.codes, HostArray(DType.F32, (16,), table.data), form.scales, form.shape)
    packer = Packer(Arena(huge=False), 2, exact=exact)
    weight = packer.add(lut)
    packer.finish()
    assert weight.kind == "lut4 g32"
    assert weight.native.kind == (abi.LUT4 if exact else abi.LUT8)
    if not exact:
        assert weight.native.unit == 0.5
        assert list(weight.native.levels) == [int(2 * entry) for entry in E2M1]
    assert_packed(lut, weight)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_dense(dtype: DType) -> None:
    kind = {DType.BF16: np.uint16, DType.F32: np.uint32}[dtype]
    values = RNG.integers(0, 2**16, (37, 48)).astype(kind)
    weight, _arena = packed(Dense(host(dtype, values)))
    panels = memory(weight.native.codes, kind, 3, 48, 16)
    assert np.array_equal(panels.transpose(0, 2, 1).reshape(48, 48)[:37], values)


def blocks_of(kind: str, n: int, k: int, *, exact: bool = False) -> GroupInt | Lut16:
    stored = BLOCK_TYPES[kind]
    blocks = RNG.integers(0, 256, (n * k // stored.weights, stored.nbytes), np.uint8)
    for at in (0, 2, stored.nbytes - 4, stored.nbytes - 2):  # wherever f16 numbers are: small ones
        blocks[:, at + 1] = 0x20
    if kind == "MXFP4":
        blocks[:, 0] = RNG.integers(100, 140, len(blocks))
    raw = HostArray(DType.U8, (blocks.size,), memoryview(bytearray(blocks.tobytes())))
    return unblock(kind, raw, (n, k), lambda form: ModelFileError("damaged"), exact=exact)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_are_packed_like_the_form_they_stand_for(kind: str, ordered: bool) -> None:
    form: Form = blocks_of(kind, 40, 512)
    if ordered:
        form = rows(rows(form, RNG.permutation(40).tolist()), range(3, 40))
    assert isinstance(form, GroupInt | Lut16)
    assert form.blocks is not None
    weight, _first = packed(form)
    assert "data" not in vars(form.codes)  # nobody has looked at the arrays
    assert_packed(form, weight)
    weight, _arena = packed(replace(form, blocks=None))
    assert_packed(form, weight)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mins", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (17, 48), (50, 176), (33, 4096)])
def test_four_bits_in_groups_of_16_are_widened(
    shape: tuple[int, int], mins: bool, threads: int
) -> None:
    form = group_int(4, 16, shape, mins)
    weight, _arena = packed(form, threads)
    assert weight.native.kind == abi.W8
    assert weight.kind == ("int8 g16 +min" if mins else "int8 g16")
    assert weight.nbytes == weight.native.panels * 16 * shape[1] * (10 if mins else 9) // 8
    assert_packed(form, weight)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K"])
def test_widened_weights_multiply_as_before(kind: str) -> None:
    # What is packed weighs, number by number, what the form does.
    form = blocks_of(kind, 20, 256)
    assert isinstance(form, GroupInt)
    weight, _arena = packed(form)
    codes = np.frombuffer(form.codes.data, np.uint8)
    u = np.stack((codes & 15, codes >> 4), -1).reshape(form.shape).astype(int)
    wide = unpacked(weight)[:20].astype(int)
    assert np.array_equal(wide - 128, u - 8) if form.mins is None else np.array_equal(wide, u)


def test_tables_in_groups_of_16_are_refused() -> None:
    form = group_int(4, 16, (4, 32), mins=False)
    table = HostArray(DType.F32, (16,), memoryview(bytearray(64)))
    with pytest.raises(UnavailableError, match="groups of 32 columns or more"):
        packed(Lut16(16, form.codes, table, form.scales, form.shape))


def test_exact_blocks() -> None:
    form = blocks_of("Q4_K", 17, 256, exact=True)
    assert isinstance(form, GroupInt)
    weight, _arena = packed(form)
    assert weight.native.type == abi.F32
    assert form.mins is not None
    found = memory(weight.native.mins, np.float32, 2, 8, 16).transpose(0, 2, 1).reshape(32, 8)
    assert found[:17].tobytes() == bytes(form.mins.data)


@pytest.mark.parametrize(
    ("kind", "at", "value"), [("Q8_0", 1, 0x7C), ("MXFP4", 0, 0xFF), ("IQ4_NL", 1, 0x7C)]
)
def test_blocks_that_are_not_finite_are_refused(kind: str, at: int, value: int) -> None:
    good, bad = blocks_of(kind, 64, 64), blocks_of(kind, 64, 64)
    assert bad.blocks is not None
    bad.blocks.raw.data[63 * 2 * BLOCK_TYPES[kind].nbytes + at] = value
    packer = Packer(Arena(huge=False), 2)
    for form in (good, bad, good):
        packer.add(form)
    with pytest.raises(ModelFileError, match="damaged"):
        packer.finish()


def test_many_weights_are_packed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BATCH_BYTES", 30_000)
    forms = [group_int(4, 32, (n, 96), mins=True) for n in range(1, 60)]
    arena = Arena(huge=False)
    packer = Packer(arena, 3)
    made = [packer.add(form) for form in forms]
    packer.finish()
    packer.finish()  # nothing is left to do
    for form, weight in zip(forms, made, strict=True):
        assert_packed(form, weight)
