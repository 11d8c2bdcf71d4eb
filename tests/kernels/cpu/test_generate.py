"""The committed AVX2 kernels are what the generator writes, and say what they overwrite."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from llmrun.kernels.cpu import generate

KINDS = ("w4", "w8", "small", "levels")


@pytest.mark.parametrize("kind", KINDS)
def test_regeneration_gives_the_committed_bytes(kind: str) -> None:
    committed = files("llmrun.kernels.cpu").joinpath(f"{kind}_avx2.inc").read_bytes()
    assert committed == generate.render(kind).encode(), (
        "run: python -m llmrun.kernels.cpu.generate kernels/cpu"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_main_writes_what_render_gives(kind: str, tmp_path: Path) -> None:
    generate.main(tmp_path)
    assert (tmp_path / f"{kind}_avx2.inc").read_bytes() == generate.render(kind).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_macros_do_not_leak_into_the_next_file(kind: str) -> None:
    text = generate.render(kind)
    defined = re.findall(r"^#define (\w+)", text, re.M)
    assert defined
    assert sorted(defined) == sorted(re.findall(r"^#undef (\w+)$", text, re.M))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_meets_every_weight_and_activation_of_a_block_once(kind: str) -> None:
    """Counted from the text: which bytes each sum is made of."""
    functions = re.findall(
        r"^void (\w+)\(Walk a\) \{$(.*?)^\}$", generate.render(kind), re.M | re.S
    )
    halves_apart = kind == "levels"
    # For each sort of minima: 2 to 5 tokens; 1 and 2 panels.
    assert len(functions) == len(generate.MINIMA[kind]) * (4 + 2) - halves_apart
    for name, body in functions:
        shape, count = name.split("_")[1], int(name.split("_")[2])
        if halves_apart:
            met = half_products(body) if shape == "gemm" else pair_products(body)
        else:
            met = gemm_products(body) if shape == "gemm" else gemv_products(body)
        tokens, panels = (count, 1) if shape == "gemm" else (1, count)
        expected = {
            (panel, 64 * j + 32 * half, part, token)
            for panel in range(panels)
            for half in range(1 if halves_apart and shape == "gemm" else 2)
            for j in range(4)
            for part in range(2)
            for token in range(tokens)
        }
        assert len(met) == len(set(met))
        assert set(met) == expected, name


Product = tuple[int, int, int, int]  # panel, byte of the panel's block, part, token


def gemm_products(body: str) -> list[Product]:
    """What DOT_ROWS multiplies; the activation's place must name the part, the sum its token."""
    met = []
    weights = [(0, 0), (0, 0)]
    word = r'(FIRST|SECOND)\("(\d+)\(%\[w\]\)", (\d+)\)|ACTS\((\d+), 12\) DOT_ROWS\((\d+), (\d+)\)'
    for part, byte, register, at, first, second in re.findall(word, body):
        if part:
            weights[int(register) - 10] = (int(byte), int(part == "SECOND"))
            continue
        token, offset = divmod(int(at), 32)
        assert (int(first), int(second)) == (2 * token, 2 * token + 1)
        for weight_byte, weight_part in weights:
            assert offset == weight_byte // 64 * 8 + 4 * weight_part
            met.append((0, weight_byte, weight_part, token))
    return met


def half_products(body: str) -> list[Product]:
    """The same for half a panel, whose codes have two sums for each token."""
    met = []
    weight = (0, 0)
    word = (
        r'(FIRST|SECOND)\("(\d+)\(%\[w\]\)", 10\) HALVES\(10, 11\)'
        r"|ACTS\((\d+), 12\) DOT_ROWS\((\d+), (\d+)\)"
    )
    for part, byte, at, low, up in re.findall(word, body):
        if part:
            weight = (int(byte), int(part == "SECOND"))
            continue
        token, offset = divmod(int(at), 32)
        assert (int(low), int(up)) == (2 * token, 2 * token + 1)
        assert offset == weight[0] // 64 * 8 + 4 * weight[1]
        met.append((0, *weight, token))
    return met


def pair_products(body: str) -> list[Product]:
    """What DOT_HALVES multiplies: both parts of 8 rows, whose codes have two sums."""
    met = []
    acts = {12: -1, 13: -1}
    word = r'ACTS\((\d+), (\d+)\)|BOTH\("(\d+)\(%\[w\]\)"\) DOT_HALVES\((\d+), (\d+)\)'
    for at, register, byte, low, up in re.findall(word, body):
        if at:
            acts[int(register)] = int(at)
            continue
        step, half = divmod(int(byte), 64)
        assert acts == {12: 8 * step, 13: 8 * step + 4}
        assert (int(low), int(up)) == (2 + half // 16, 3 + half // 16)
        met += [(0, int(byte), part, 0) for part in range(2)]
    return met


def gemv_products(body: str) -> list[Product]:
    """What DOT_PARTS multiplies; sums lie behind the accumulators, in the order of the rows."""
    met = []
    acts = {12: -1, 13: -1}
    word = r'ACTS\((\d+), (\d+)\)|BOTH\("(\d+)\(%\[w\](,%\[w_panel\])?\)"\) DOT_PARTS\((\d+)\)'
    sums = len(re.findall(r"FETCH", body))
    for at, register, byte, panel, total in re.findall(word, body):
        if at:
            acts[int(register)] = int(at)
            continue
        step, half = divmod(int(byte), 64)
        assert acts == {12: 8 * step, 13: 8 * step + 4}
        assert int(total) == sums + 2 * bool(panel) + half // 32
        met += [(int(bool(panel)), int(byte), part, 0) for part in range(2)]
    return met
