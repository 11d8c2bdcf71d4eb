"""Storage forms against their formulas in float64, worked out one weight at a time."""

import struct
from dataclasses import replace

import pytest
import torch

from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16, bits_per_weight, rows
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.reference import weights
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.kernels.reference.weights import Scratch, take_over

CPU = torch.device("cpu")


def random_bytes(shape: tuple[int, ...], seed: int) -> HostArray:
    generator = torch.Generator().manual_seed(seed)
    return to_host(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))


def random_scales(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> HostArray:
    generator = torch.Generator().manual_seed(seed)
    return to_host((torch.randn(shape, generator=generator) / 8).to(dtype))


def make(kind: str) -> Form:
    n, k = 9, 384
    if kind.startswith("dense"):
        dtype = {"16": torch.bfloat16, "32": torch.float32}[kind[-2:]]
        return Dense(random_scales((n, k), dtype, 1))
    if kind == "lut":
        table = to_host(torch.linspace(-1, 1, 16) ** 3)
        scales = random_scales((n, k // 64), torch.float32, 2)
        return Lut16(64, random_bytes((n, k // 2), 3), table, scales, (n, k))
    bits, group, with_mins = int(kind[3]), int(kind.split("-")[1]), kind.endswith("m")
    dtype = {32: torch.float16, 64: torch.bfloat16, 128: torch.float32, 0: torch.float16}[group]
    n_groups = k // (group or k)
    mins = random_scales((n, n_groups), dtype, 5) if with_mins else None
    if kind.endswith("z"):
        mins = random_bytes((n, n_groups), 5)
    scales = random_scales((n, n_groups), dtype, 4)
    return GroupInt(bits, group, random_bytes((n, k * bits // 8), 6), scales, mins, (n, k))


KINDS = ["dense16", "dense32", "lut", "int4-32", "int4-32-m", "int4-64", "int8-128", "int8-0"]
KINDS += ["int8-32-m", "int4-128-m", "int4-32-z", "int4-64-z", "int8-0-z"]


def formula(form: Form, row: int, k: int) -> float:
    """The weight by the text of the contract."""
    if isinstance(form, Dense):
        return float(as_tensor(form.w)[row, k])
    group = form.group or form.shape[1]
    scale = float(as_tensor(form.scales)[row, k // group])
    bits = form.bits if isinstance(form, GroupInt) else 4
    byte = form.codes.data[row * form.codes.shape[1] + (k if bits == 8 else k // 2)]
    code = byte if bits == 8 else (byte & 15, byte >> 4)[k % 2]
    if isinstance(form, Lut16):
        return scale * struct.unpack_from("<f", form.table.data, 4 * code)[0]
    if form.mins is None:
        return scale * (code - 2 ** (bits - 1))
    least = float(as_tensor(form.mins)[row, k // group])
    return scale * (code - least) if form.mins.dtype is DType.U8 else scale * code + least


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_rows_follow_the_formula(kind: str) -> None:
    form = make(kind)
    weight = take_over(form, Scratch(CPU), CPU)
    got = weight.gather_rows(torch.arange(2, 7), torch.empty(5, form.shape[1]))
    want = torch.tensor(
        [[formula(form, row, k) for k in range(form.shape[1])] for row in range(2, 7)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(got.double(), want, rtol=3e-7, atol=3e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_be_gathered_in_any_order(kind: str) -> None:
    form = make(kind)
    order = [8, 0, 3, 3]
    whole = gathered(form, list(range(9)))
    assert torch.equal(gathered(rows(form, order), [0, 1, 2, 3]), whole[order])
    assert torch.equal(gathered(form, order), whole[order])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", [1, 7])
@pytest.mark.parametrize("panel_bytes", [1, 4096, 1 << 20])
def test_products_equal_those_of_the_dequantized_weight(
    kind: str, n_tokens: int, panel_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PANEL_BYTES", panel_bytes)
    form = make(kind)
    x = torch.randn(n_tokens, 384, generator=torch.Generator().manual_seed(9))
    y = torch.full((n_tokens, 9), float("nan"))
    take_over(form, Scratch(CPU), CPU).multiply(x, y)
    want = x.double() @ gathered(form, list(range(9))).double().t()
    atol = max(1e-5, 1e-6 * float(want.abs().max()))
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=atol)


def gathered(form: Form, index: list[int]) -> torch.Tensor:
    weight = take_over(form, Scratch(CPU), CPU)
    return weight.gather_rows(torch.tensor(index), torch.empty(len(index), form.shape[1]))


def test_bits_per_weight_counts_every_byte() -> None:
    assert bits_per_weight(make("int4-32")) == 4 + 16 / 32
    assert bits_per_weight(make("int4-32-m")) == 4 + 2 * 16 / 32
    assert bits_per_weight(make("int4-32-z")) == 4 + (16 + 8) / 32
    assert bits_per_weight(make("int8-128")) == 8 + 32 / 128
    assert bits_per_weight(make("dense16")) == 16
    assert bits_per_weight(make("lut")) == 4 + 32 / 64 + 16 * 32 / (9 * 384)


@pytest.mark.parametrize("kind", ["int4-32-z", "int8-0-z"])
def test_zero_points_are_minima_of_fp32(kind: str) -> None:
    form = make(kind)
    assert isinstance(form, GroupInt)
    assert form.mins is not None
    assert form.kind == f"{'int4 g32' if form.bits == 4 else 'int8 row'} +zero"
    mins = -(as_tensor(form.scales).float() * as_tensor(form.mins).float())
    wide = replace(form, scales=to_host(as_tensor(form.scales).float()), mins=to_host(mins))
    assert wide.kind == form.kind.replace("zero", "min")
    assert torch.equal(gathered(form, [3, 0]), gathered(wide, [3, 0]))


def test_a_form_whose_arrays_do_not_fit_is_refused() -> None:
    codes, scales = random_bytes((4, 16), 0), random_scales((4, 1), torch.float16, 0)
    GroupInt(4, 32, codes, scales, None, (4, 32))
    for shape in ((4, 64), (5, 32), (4, 48)):
        with pytest.raises(ValueError, match=r"codes|shape|scales"):
            GroupInt(4, 32, codes, scales, None, shape)
    with pytest.raises(ValueError, match="needs 32 bytes"):
        HostArray(DType.F32, (8,), memoryview(bytearray(31)))
