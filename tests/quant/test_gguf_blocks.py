"""Blocks become storage forms as gguf's own dequantization reads them, natively and with torch."""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from llmrun.kernels.forms import Form, GroupInt, Lut16, bits_per_weight, rows
from llmrun.kernels.host import DType, HostArray
from llmrun.quant import gguf_blocks
from llmrun.quant.gguf_blocks import BLOCK_TYPES, unblock

K_TYPES = [kind for kind, stored in BLOCK_TYPES.items() if stored.products]
HEADS = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108]}
HEADS |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": []}
"""Where the f16 numbers of a block are, if not at its first byte alone."""
EDGES = [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 500.0, -500.0]


@pytest.fixture(params=["native", "torch"])
def unpacker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the native library, or as if there were none."""
    if request.param == "torch":
        monkeypatch.setattr(gguf_blocks, "problem", lambda: "no library")
    elif (reason := gguf_blocks.problem()) is not None:
        pytest.skip(f"no native library: {reason}")
    return request.param


class Refused(Exception):
    """What these tests raise for numbers that are not finite."""


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Random bytes, u8 [count, bytes]; f16 numbers are small, or one of EDGES (all occur)."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCK_TYPES[kind].nbytes), np.uint8)
    for index, at in enumerate(HEADS.get(kind, [0])):
        numbers = rng.standard_normal(count).astype(np.float16)
        numbers[index::3] = np.resize(np.array(EDGES, np.float16), len(numbers[index::3]))
        blocks[:, at : at + 2] = numbers[:, None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] %= 255  # the last exponent is refused
    return blocks


def unblocked(kind: str, blocks: np.ndarray, n: int, exact: bool = False) -> GroupInt | Lut16:
    raw = bytearray(blocks.tobytes())
    shape = (n, blocks.shape[0] * BLOCK_TYPES[kind].weights // n)
    host = HostArray(DType.U8, (len(raw),), memoryview(raw))
    return unblock(kind, host, shape, Refused, exact=exact)


def reference(kind: str, blocks: np.ndarray, n: int) -> np.ndarray:
    """Weights f32 [n, K] by the gguf package."""
    type_ = gguf.GGMLQuantizationType[kind]
    with np.errstate(over="ignore"):
        return gguf.quants.dequantize(blocks.reshape(n, -1), type_)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def fp32(form: GroupInt | Lut16, oracle: SimpleNamespace) -> np.ndarray:
    """The weight by the form's formula, every operation in fp32."""
    s = oracle.spread(form.scales, form.shape[1]).astype(np.float32)
    if isinstance(form, Lut16):
        with np.errstate(over="ignore"):
            return s * oracle.read(form.table).astype(np.float32)[oracle.levels(form)]
    u = oracle.levels(form).astype(np.float32)
    if form.mins is None:
        return s * (u - np.float32(2 ** (form.bits - 1)))
    return s * u + oracle.spread(form.mins, form.shape[1]).astype(np.float32)


@pytest.mark.parametrize(("n", "blocks_per_row"), [(1, 1), (3, 2), (7, 5), (65, 3)])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_exact_is_bit_for_bit_the_reference(
    kind: str, n: int, blocks_per_row: int, unpacker: str, oracle: SimpleNamespace
) -> None:
    blocks = random_blocks(kind, n * blocks_per_row)
    form = unblocked(kind, blocks, n, exact=True)
    assert same_bits(fp32(form, oracle), reference(kind, blocks, n))
    stored = BLOCK_TYPES[kind]
    assert form.group == stored.group
    assert isinstance(form, Lut16) == (stored.table is not None)
    if isinstance(form, GroupInt):
        assert (form.bits, form.mins is not None) == (stored.bits, stored.mins)


def assert_rounded_once(form: Form, exact: Form, oracle: SimpleNamespace) -> None:
    assert bytes(form.arrays["codes"].data) == bytes(exact.arrays["codes"].data)
    for name in form.arrays.keys() - {"codes", "table"}:
        rounded = oracle.read(exact.arrays[name]).astype(np.float16)
        assert form.arrays[name].dtype is DType.F16
        assert bytes(form.arrays[name].data) == rounded.tobytes()


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES.keys() - {"MXFP4"}))
def test_by_default_each_product_is_rounded_once(
    kind: str, unpacker: str, oracle: SimpleNamespace
) -> None:
    blocks = random_blocks(kind, 300)
    assert_rounded_once(unblocked(kind, blocks, 4), unblocked(kind, blocks, 4, exact=True), oracle)


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES.keys() - K_TYPES - {"IQ4_NL"}))
def test_what_the_format_itself_makes(kind: str, unpacker: str, oracle: SimpleNamespace) -> None:
    weight = np.random.default_rng(1).standard_normal((5, 96), np.float32)
    weight[1] = 0
    blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    form = unblocked(kind, blocks.reshape(-1, BLOCK_TYPES[kind].nbytes), 5)
    assert same_bits(fp32(form, oracle), reference(kind, blocks, 5))


def extremes(kind: str) -> np.ndarray:
    """Blocks of equal bytes (codes and scales at both ends), with d and dmin of all signs."""
    fills = [0x00, 0xFF, 0x0F, 0xF0, 0x3F, 0xC0, 0x80, 0x7F]
    numbers = np.array([1.5, -1.5, 0, -0.0, 6e-8, 100], np.float16)
    blocks = np.repeat(np.array(fills, np.uint8), len(numbers) ** 2)[:, None]
    blocks = np.repeat(blocks, BLOCK_TYPES[kind].nbytes, axis=1)
    for index, at in enumerate(HEADS.get(kind, [0])):
        column = np.resize(np.repeat(numbers, len(numbers) ** index), len(blocks))
        blocks[:, at : at + 2] = column[:, None].view(np.uint8)
    if kind == "MXFP4":
        blocks[blocks[:, 0] == 255, 0] = 254
    return blocks


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_extremes(kind: str, unpacker: str, oracle: SimpleNamespace) -> None:
    blocks = extremes(kind)
    form = unblocked(kind, blocks, 2, exact=True)
    assert same_bits(fp32(form, oracle), reference(kind, blocks, 2))
    zero = np.zeros((3, BLOCK_TYPES[kind].nbytes), np.uint8)
    assert not fp32(unblocked(kind, zero, 1), oracle).any()


@pytest.mark.parametrize("kind", K_TYPES)
def test_sixteen_bits_cost_little(kind: str, unpacker: str, oracle: SimpleNamespace) -> None:
    blocks = np.random.default_rng(2).integers(0, 256, (400, BLOCK_TYPES[kind].nbytes), np.uint8)
    for at in HEADS.get(kind, [0]):
        blocks[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    expected = reference(kind, blocks, 4).astype(np.float64)
    error = oracle.decode(unblocked(kind, blocks, 4)) - expected
    assert 0 < (error**2).mean() / (expected**2).mean() < 1e-6


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES.keys() - {"MXFP4"}))
def test_numbers_that_are_not_finite_are_told(kind: str, exact: bool, unpacker: str) -> None:
    for at in HEADS.get(kind, [0]):
        for bits in (0x7C00, 0xFC00, 0x7E00, 0x7C01):
            blocks = np.ones((4, BLOCK_TYPES[kind].nbytes), np.uint8)
            blocks[2, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
            raw = bytearray(blocks.tobytes())
            shape = (2, 2 * BLOCK_TYPES[kind].weights)
            host = HostArray(DType.U8, (len(raw),), memoryview(raw))
            with pytest.raises(Refused):
                assert unblock(kind, host, shape, Refused, exact=exact).codes.data


@pytest.mark.parametrize("exact", [False, True])
def test_mxfp4_has_every_exponent_but_the_last(
    exact: bool, unpacker: str, oracle: SimpleNamespace
) -> None:
    # Every code beside every exponent. Twice the last power of two of fp32 is no number, and the
    # standard that the type follows gives that exponent to none.
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) | (np.arange(16)[::-1] << 4)
    form = unblocked("MXFP4", blocks[:255], 5, exact)
    assert form.scales.dtype is DType.BF16
    assert same_bits(fp32(form, oracle), reference("MXFP4", blocks[:255], 5))
    with pytest.raises(Refused):
        assert unblocked("MXFP4", blocks, 4, exact).scales.data


def test_q3_k_reaches_every_code_and_scale(unpacker: str, oracle: SimpleNamespace) -> None:
    form = unblocked("Q3_K", random_blocks("Q3_K", 200), 2, exact=True)
    assert np.array_equal(np.unique(oracle.levels(form)), np.arange(4, 12))
    blocks = random_blocks("Q3_K", 200)
    blocks[:, 108:110] = np.array([1], np.float16).view(np.uint8)
    scales = oracle.read(unblocked("Q3_K", blocks, 2, exact=True).scales)
    assert np.array_equal(np.unique(scales), np.arange(-32, 32))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_both_ways_make_the_same_bytes(
    kind: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := gguf_blocks.problem()) is not None:
        pytest.skip(f"no native library: {reason}")
    blocks = random_blocks(kind, 700)  # more than torch takes at a time
    native = {k: bytes(a.data) for k, a in unblocked(kind, blocks, 7, exact).arrays.items()}
    monkeypatch.setattr(gguf_blocks, "problem", lambda: "no library")
    made = {k: bytes(a.data) for k, a in unblocked(kind, blocks, 7, exact).arrays.items()}
    assert native == made


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_rows_keep_their_blocks(kind: str, oracle: SimpleNamespace) -> None:
    form = unblocked(kind, random_blocks(kind, 12), 6)
    picked = rows(rows(form, [5, 0, 3, 1]), [2, 0])
    assert np.array_equal(oracle.decode(picked), oracle.decode(form)[[3, 5]])
    if gguf_blocks.problem() is None:
        assert isinstance(picked, GroupInt | Lut16)
        assert picked.blocks is not None
        assert picked.blocks.order == [3, 5]


@pytest.mark.parametrize("kind", K_TYPES)
def test_a_product_beyond_sixteen_bits_is_told(kind: str, unpacker: str) -> None:
    blocks = np.full((1, BLOCK_TYPES[kind].nbytes), 0x3F, np.uint8)
    blocks[:, HEADS.get(kind, [0])[0] :][:, :2] = np.array([30_000], np.float16).view(np.uint8)
    raw = bytearray(blocks.tobytes())
    host = HostArray(DType.U8, (len(raw),), memoryview(raw))
    with pytest.raises(Refused):
        assert unblock(kind, host, (1, 256), Refused).scales.data
    assert unblock(kind, host, (1, 256), Refused, exact=True).scales.data


@pytest.mark.parametrize("kind", K_TYPES)
def test_rounding_beside_every_scale(kind: str, unpacker: str, oracle: SimpleNamespace) -> None:
    # All scales of every kind beside all f16 numbers that stay in range, subnormal ones included.
    numbers = np.arange(0x5000, dtype=np.uint16).view(np.float16)[::7]
    blocks = np.random.default_rng(3).integers(
        0, 256, (len(numbers), BLOCK_TYPES[kind].nbytes), np.uint8
    )
    for at in HEADS.get(kind, [0]):
        blocks[:, at : at + 2] = numbers[:, None].view(np.uint8)
    assert_rounded_once(unblocked(kind, blocks, 1), unblocked(kind, blocks, 1, exact=True), oracle)


def test_wrong_sizes_are_our_fault() -> None:
    raw = HostArray(DType.U8, (18,), memoryview(bytearray(18)))
    for kind, shape in [("Q4_0", (1, 64)), ("Q4_0", (2, 16)), ("Q4_K", (1, 32))]:
        with pytest.raises(ValueError, match=kind):
            unblock(kind, raw, shape, Refused)


def test_numbers_and_sizes_are_those_of_gguf() -> None:
    for kind, stored in BLOCK_TYPES.items():
        type_ = gguf.GGMLQuantizationType[kind]
        assert (type_.value, gguf.GGML_QUANT_SIZES[type_]) == (
            stored.number,
            (stored.weights, stored.nbytes),
        )


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_bits_per_weight_are_those_of_the_form(kind: str) -> None:
    form = unblocked(kind, random_blocks(kind, 6), 3)
    table = 8 * 64 / (form.shape[0] * form.shape[1]) if isinstance(form, Lut16) else 0
    assert BLOCK_TYPES[kind].bits_per_weight == pytest.approx(bits_per_weight(form) - table)


@pytest.mark.parametrize("kind", list(BLOCK_TYPES))
def test_the_kind_is_known_without_reading(kind: str) -> None:
    stored = BLOCK_TYPES[kind]
    raw = HostArray(DType.U8, (stored.nbytes,), memoryview(bytearray(stored.nbytes)))
    form = unblock(kind, raw, (1, stored.weights), lambda form: AssertionError(form.kind))
    assert form.kind == stored.form_kind
