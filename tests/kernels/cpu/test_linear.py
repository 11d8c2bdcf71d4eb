"""Matrix products bit for bit against integer arithmetic, on every instruction set."""

import functools
from collections.abc import Callable

import pytest
import torch

from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import ROW, Dense, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import Linear, Norm, Span

Fill = Callable[[CpuArray, torch.Tensor], CpuArray]
Read = Callable[[CpuArray], torch.Tensor]

TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32}


def host(values: torch.Tensor, dtype: DType) -> HostArray:
    raw = values.contiguous().view(torch.uint8).flatten().numpy().tobytes()
    return HostArray(dtype, tuple(values.shape), memoryview(bytearray(raw)))


def group_int(
    bits: int,
    group: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    mins: torch.Tensor | None,
    dtype: DType,
) -> GroupInt:
    n, k = codes.shape
    packed = nibbles(codes) if bits == 4 else codes.to(torch.uint8)
    held = None
    if mins is not None:
        is_zeros = mins.dtype is torch.uint8
        held = host(mins, DType.U8) if is_zeros else host(mins.to(TORCH[dtype]), dtype)
    scale = host(scales.to(TORCH[dtype]), dtype)
    return GroupInt(bits, group, host(packed, DType.U8), scale, held, (n, k))


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    packed = codes.to(torch.uint8)
    return packed[:, 0::2] | (packed[:, 1::2] << 4)


def lut(
    group: int, codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, dtype: DType
) -> Lut16:
    scale = host(scales.to(TORCH[dtype]), dtype)
    packed, values = host(nibbles(codes), DType.U8), host(table.float(), DType.F32)
    return Lut16(group, packed, values, scale, (codes.shape[0], codes.shape[1]))


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in fp32 with one rounding.

    The sum in double is rounded to odd, so that rounding it again to fp32 is right (Boldo and
    Melquiond, 2008).
    """
    product, c = a.double() * b.double(), c.double()  # the product is exact
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(torch.int64)
    away = ((error > 0) == (total > 0)).long() * 2 - 1
    odd = torch.where((error != 0) & (bits % 2 == 0), bits + away, bits)
    return odd.view(torch.float64).float()


def quantized(part: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integer codes of some columns and their scale [rows, 1]."""
    top = part.abs().amax(-1, keepdim=True)
    factor = torch.where(top > 0, limit / top, torch.zeros(()))
    return torch.round(part * factor), top / limit


def standing_out(scales: torch.Tensor) -> torch.Tensor:
    """Which groups [rows, groups] are refined: over twice the row's mean, by the floats' bits."""
    bits = scales.contiguous().view(torch.int32).long()
    return bits > bits.sum(-1, keepdim=True) // bits.shape[-1] + 2**23


def expected(
    bits: int,
    group: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    mins: torch.Tensor | None,
    x: torch.Tensor,
) -> torch.Tensor:
    """The contract of kernels.h in int64 and fp32, one group after the other.

    Minima of u8 are zero points. Codes of 4 bits may be signed numbers instead.
    """
    n, k = codes.shape
    if mins is not None and mins.dtype is torch.uint8:
        mins = -(scales.float() * mins.float())
    size = group or k
    step = 32 if bits == 4 else min(128, size)
    limit = torch.tensor(127.0 if bits == 4 else 32639.0)  # plain numbers divide less exactly
    total = torch.zeros(len(x), n)
    middle = 0 if mins is not None or codes.dtype is torch.int8 else 2 ** (bits - 1)

    def add(first: int, values: torch.Tensor, scale: torch.Tensor) -> None:
        nonlocal total
        dot = values.long() @ (codes[:, first : first + step].long() - middle).T
        total = fma(dot.float(), scales[:, first // size].float() * scale, total)
        if mins is not None:
            sums = scale * values.sum(-1, keepdim=True)
            total = fma(mins[:, first // size].float(), sums, total)

    parts = [x[:, first : first + step] for first in range(0, k, step)]
    made = [quantized(part, limit) for part in parts]
    for i, (values, scale) in enumerate(made):
        add(i * step, values, scale)
    if bits == 4:
        refined = standing_out(torch.cat([scale for _, scale in made], -1))
        for i, (values, scale) in enumerate(made):
            left = (parts[i] - values * scale) * refined[:, i : i + 1]
            add(i * step, *quantized(left, limit))
    return total


def multiply(
    cpu: CpuBackend, weight: object, x: torch.Tensor, n: int, fill: Fill, read: Read
) -> torch.Tensor:
    tokens, k = x.shape
    step = cpu.step(64)
    step.set([0] * tokens, [Span(0, 0, tokens, 0)], [])
    source = fill(cpu.empty((64, k)), x)
    out = fill(cpu.empty((64, n)), torch.zeros(tokens, n))
    cpu.linear_add(step, source, Linear(weight), None, out)  # type: ignore[arg-type]
    values = read(out)
    assert values[tokens:].isnan().all()
    return values[:tokens]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Wanted = list[tuple[torch.Tensor, torch.Tensor]]
"""Rows of activations, and their products."""

WIDTHS = (1, 2, 3, 5, 9, 11, 13, 17, 33)
N, K = 83, 384
GROUPS = [(4, g) for g in (32, 64, 128, ROW)] + [(8, g) for g in (16, 32, 64, 128, ROW)]
CASES = [(bits, g, minima) for bits, g in GROUPS for minima in ("none", "typed")]
CASES += [(bits, g, "zero points") for bits, g in ((4, 32), (4, 128), (4, ROW), (8, 16), (8, 128))]


def rows_of(tokens: int) -> torch.Tensor:
    x = randn(tokens, K, seed=tokens) * torch.linspace(0.1, 9, K)
    x[1::2, 70] *= 40  # its group stands out
    return x


@functools.cache
def integer_case(bits: int, group: int, minima: str, dtype: DType) -> tuple[GroupInt, Wanted]:
    generator = torch.Generator().manual_seed(bits * 1000 + group)
    codes = torch.randint(0, 2**bits, (N, K), generator=generator)
    groups = K // (group or K)
    scales = (0.01 * randn(N, groups, seed=1)).to(TORCH[dtype])  # negative ones too
    mins = None
    if minima == "typed":
        mins = (0.05 * randn(N, groups, seed=2)).to(TORCH[dtype])
    if minima == "zero points":
        mins = torch.randint(0, 2**bits, (N, groups), generator=generator).to(torch.uint8)
    wanted = [(x, expected(bits, group, codes, scales, mins, x)) for x in map(rows_of, WIDTHS)]
    return group_int(bits, group, codes, scales, mins, dtype), wanted


@pytest.mark.parametrize(("bits", "group", "minima"), CASES)
@pytest.mark.parametrize("dtype", list(TORCH))
def test_every_width_has_the_bits_of_integer_arithmetic(
    cpu: CpuBackend,
    fill: Fill,
    read: Read,
    bits: int,
    group: int,
    minima: str,
    dtype: DType,
) -> None:
    form, wanted = integer_case(bits, group, minima, dtype)
    weight = cpu.weight(form)
    for x, want in wanted:
        assert torch.equal(multiply(cpu, weight, x, N, fill, read), want), len(x)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_zero_points_are_minima_of_fp32(
    cpu: CpuBackend, fill: Fill, read: Read, bits: int, dtype: DType
) -> None:
    n, k, groups = 83, 384, 3
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (n, k), generator=generator)
    zeros = torch.randint(0, 256, (n, groups), generator=generator).to(torch.uint8)
    scales = (0.01 * randn(n, groups, seed=1)).to(TORCH[dtype])
    mins = -(scales.float() * zeros.float())
    small = cpu.weight(group_int(bits, 128, codes, scales, zeros, dtype))
    wide = cpu.weight(group_int(bits, 128, codes, scales.float(), mins, DType.F32))
    assert small.kind == f"int{bits} g128 +zero"
    assert small.nbytes == wide.nbytes - 96 * groups * (4 + 4 - 2 - 1)
    for tokens in (1, 2, 8, 40):
        x = randn(tokens, k, seed=tokens) * torch.linspace(0.1, 9, k)
        got = [multiply(cpu, weight, x, n, fill, read) for weight in (small, wide)]
        assert torch.equal(*got), tokens


TABLES = {
    "iq4": ((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), 1.0),
    "e2m1": ((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), 0.5),
    "sixteen": ((-16, 16, 5, 3) * 4, 2.0**-20),
    "seventeen": ((-17, 16, 5, 3) * 4, 2.0**9),
    "ends": ((-128, 127) * 8, 1.0),
}


@functools.cache
def table_case(name: str, group: int, dtype: DType) -> tuple[Lut16, Wanted]:
    levels, unit = torch.tensor(TABLES[name][0], dtype=torch.int8), TABLES[name][1]
    codes = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(group))
    scales = (0.01 * randn(N, K // group, seed=1)).to(TORCH[dtype])
    full = scales.float() * unit
    wanted = [(x, expected(4, group, levels[codes], full, None, x)) for x in map(rows_of, WIDTHS)]
    return lut(group, codes, levels * unit, scales, dtype), wanted


@pytest.mark.parametrize(("group", "dtype"), list(zip((32, 64, 128), TORCH, strict=True)))
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_integers_have_the_bits_of_integer_arithmetic(
    cpu: CpuBackend, fill: Fill, read: Read, name: str, dtype: DType, group: int
) -> None:
    form, wanted = table_case(name, group, dtype)
    weight = cpu.weight(form)
    for x, want in wanted:
        assert torch.equal(multiply(cpu, weight, x, N, fill, read), want), len(x)


@pytest.mark.parametrize("levels", [(-128,) * 16, (127,) * 16, (-128, 127) * 8, (16,) * 16])
@pytest.mark.parametrize("value", [1.0, -1.0, "alternating"])
def test_extreme_levels_do_not_saturate(
    cpu: CpuBackend, fill: Fill, read: Read, levels: tuple[int, ...], value: object
) -> None:
    n, k = 16, 256
    table = torch.tensor(levels, dtype=torch.int8)
    codes = torch.arange(k).expand(n, k) % 16
    x = torch.ones(1, k) if value == "alternating" else torch.full((1, k), value)
    if value == "alternating":
        x[:, 1::2] = -1
    scales = torch.full((n, k // 128), -0.5, dtype=torch.float16)
    weight = cpu.weight(lut(128, codes, table, scales, DType.F16))
    for tokens in (1, 4, 10, 12, 16):
        rows = x.expand(tokens, k)
        got = multiply(cpu, weight, rows, n, fill, read)
        assert torch.equal(got, expected(4, 128, table[codes], scales, None, rows)), tokens


def test_exact_tables_are_multiplied_in_fp32(isas: list[str], fill: Fill, read: Read) -> None:
    # The same sums, in column order, on every instruction set; nearer than 8-bit activations are.
    n, k = 35, 256
    levels = torch.tensor(TABLES["iq4"][0], dtype=torch.int8)
    codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(1))
    form = lut(32, codes, levels, randn(n, k // 32), DType.F32)
    x = randn(13, k)
    values = levels[codes].double() * randn(n, k // 32).double().repeat_interleave(32, 1)
    results = []
    for isa in isas:
        backend = CpuBackend(2, isa=isa, exact=True)
        results.append(multiply(backend, backend.weight(form), x, n, fill, read))
        torch.testing.assert_close(
            results[-1].double(), x.double() @ values.T, rtol=1e-5, atol=1e-2
        )
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("code", ["least", "most", "alternating"])
@pytest.mark.parametrize("value", [1.0, -1.0, "alternating"])
def test_extremes_do_not_saturate(
    cpu: CpuBackend, fill: Fill, read: Read, bits: int, code: str, value: object
) -> None:
    n, k = 16, 256
    codes = torch.zeros(n, k, dtype=torch.long)
    if code == "most":
        codes += 2**bits - 1
    if code == "alternating":
        codes[:, 0::2] = 2**bits - 1
    x = torch.ones(1, k) if value == "alternating" else torch.full((1, k), value)
    if value == "alternating":
        x[:, 1::2] = -1
    scales = torch.full((n, k // 128), -0.5, dtype=torch.float16)
    weight = cpu.weight(group_int(bits, 128, codes, scales, None, DType.F16))
    for tokens in (1, 4, 10, 12, 16):
        rows = x.expand(tokens, k)
        got = multiply(cpu, weight, rows, n, fill, read)
        assert torch.equal(got, expected(bits, 128, codes, scales, None, rows)), tokens


@pytest.mark.parametrize("k", [32, 96, 576, 1536, 8960])
def test_column_counts(cpu: CpuBackend, fill: Fill, read: Read, k: int) -> None:
    n = 17
    codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(k))
    scales = (0.01 * randn(n, k // 32)).half()
    weight = cpu.weight(group_int(4, 32, codes, scales, None, DType.F16))
    for tokens in (1, 7, 20):
        x = randn(tokens, k, seed=tokens)
        got = multiply(cpu, weight, x, n, fill, read)
        assert torch.equal(got, expected(4, 32, codes, scales, None, x)), tokens


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(
    cpu: CpuBackend, fill: Fill, read: Read
) -> None:
    n, k = 16, 64
    codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(1))
    scales = (0.01 * randn(n, 2)).half()
    weight = cpu.weight(group_int(4, 32, codes, scales, None, DType.F16))
    for tokens in (3, 17):
        x = randn(tokens, k)
        x[1, 5] = float("nan")
        x[2, 40] = float("inf")
        got = multiply(cpu, weight, x, n, fill, read)
        assert not got[1].isfinite().any()
        assert not got[2].isfinite().any()
        others = [t for t in range(tokens) if t not in (1, 2)]
        assert torch.equal(got[others], expected(4, 32, codes, scales, None, x[others]))


def test_tiny_and_zero_activations(cpu: CpuBackend, fill: Fill, read: Read) -> None:
    n, k = 16, 64
    codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(1))
    weight = cpu.weight(group_int(4, 32, codes, (0.01 * randn(n, 2)).half(), None, DType.F16))
    for value in (0.0, 1e-38, 1e-42):
        assert (multiply(cpu, weight, torch.full((2, k), value), n, fill, read) == 0).all()


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "lut"])
@pytest.mark.parametrize("k", [64, 160, 1024])
def test_dense_and_table_weights(
    cpu: CpuBackend, fill: Fill, read: Read, kind: str, k: int
) -> None:
    n = 35
    if kind == "lut":
        table = torch.linspace(-1, 1, 16) ** 3
        codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(k))
        scales = randn(n, k // 32).abs()
        form = Lut16(
            32,
            host((codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8), DType.U8),
            host(table, DType.F32),
            host(scales, DType.F32),
            (n, k),
        )
        values = (table[codes] * scales.repeat_interleave(32, 1)).double()
        weight = cpu.weight(form)
    else:
        dtype = DType[kind.upper()]
        held = (0.1 * randn(n, k)).to(TORCH[dtype])
        values = held.double()
        weight = cpu.weight(Dense(host(held, dtype)))
    rows = {}
    for tokens in (1, 2, 5, 13, 33):
        x = randn(33, k, seed=3)[:tokens]
        got = multiply(cpu, weight, x, n, fill, read)
        torch.testing.assert_close(got.double(), x.double() @ values.T, rtol=1e-5, atol=1e-4)
        rows[tokens] = got[0]
    assert all(torch.equal(row, rows[1]) for row in rows.values())


def test_all_instruction_sets_and_thread_counts_give_the_same_bits(
    isas: list[str], fill: Fill, read: Read
) -> None:
    n, k, tokens = 83, 256, 19
    codes = torch.randint(0, 256, (n, k), generator=torch.Generator().manual_seed(5))
    form = group_int(8, 128, codes, 0.01 * randn(n, 2), None, DType.F32)
    x = randn(tokens, k)
    results = [
        multiply(backend, backend.weight(form), x, n, fill, read)
        for isa in isas
        for backend in (CpuBackend(threads, isa=isa) for threads in (1, 2, 4))
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_pieces_of_different_bits_share_one_op(cpu: CpuBackend, fill: Fill, read: Read) -> None:
    # Each kind wants the activations in its own codes; an 8-bit one first and 4 bits behind it.
    k, sizes = 256, (48, 16, 33)
    x = randn(40, k) * torch.linspace(0.1, 9, k)
    x[1::3, 70] *= 40
    weights, wanted = [], []
    for bits, n in zip((8, 4, 4), sizes, strict=True):
        codes = torch.randint(0, 2**bits, (n, k), generator=torch.Generator().manual_seed(n))
        scales = (0.01 * randn(n, k // 32, seed=n)).half()
        form = group_int(bits, 32, codes, scales, None, DType.F16)
        weights.append(Linear(cpu.weight(form)))
        wanted.append((bits, codes, scales))
    norm = Norm(cpu.vector(host(torch.ones(k), DType.F32)), 0.0)
    for tokens in (1, 9, 40):
        step = cpu.step(64)
        step.set([0] * tokens, [Span(0, 0, tokens, 0)], [])
        y = fill(cpu.empty((64, sum(sizes))), torch.zeros(1, 1))
        cpu.norm_linear(step, fill(cpu.empty((64, k)), x[:tokens]), norm, weights, y)
        normed = x[:tokens] / x[:tokens].square().mean(-1, keepdim=True).sqrt()
        want = torch.cat([expected(b, 32, c, s, None, normed) for b, c, s in wanted], -1)
        error = (read(y)[:tokens] - want).abs().max() / want.abs().max()
        assert error < 1e-3, tokens  # the norm's own last bits move a code now and then
