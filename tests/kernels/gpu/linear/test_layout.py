"""Tiles on the device hold the codes of the forms bit for bit, at the places the kernels look."""

import weakref
from typing import Any

import pytest
import torch

from llmrun.kernels.forms import GroupInt, Lut16
from llmrun.kernels.gpu import layout, weights
from llmrun.kernels.gpu.arrays import TILE_K
from llmrun.kernels.reference.arrays import as_tensor, to_host

N, K = 130, 320


def codes(width: int) -> torch.Tensor:
    return torch.randint(0, 256, (N, width), dtype=torch.uint8)


@pytest.mark.parametrize(("pack", "unpack"), [("w4", "w4"), ("lut", "lut"), ("w8", "w8")])
def test_codes_come_back_bit_for_bit(pack: str, unpack: str) -> None:
    width = K if pack == "w8" else K // 2
    packed = weights.PACK[pack](source := codes(width))
    assert packed.shape == (3, 3, 64, 32 if pack == "w8" else 16)
    assert packed.dtype == torch.int32
    assert packed.is_contiguous()
    assert torch.equal(weights.UNPACK[unpack](packed, N, K), source)


@pytest.mark.parametrize("form", ["w4", "lut", "w8"])
def test_each_code_stands_where_the_kernels_look(form: str) -> None:
    source = codes(K if form == "w8" else K // 2)
    packed = weights.PACK[form](source)
    u = source if form == "w8" else torch.stack((source & 15, source >> 4), -1).view(N, K)
    for row, column in [(0, 0), (1, 1), (63, 127), (64, 128), (129, 319), (77, 190), (5, 65)]:
        tile, inside = divmod(column, TILE_K)
        j, e, i = inside // 32, inside % 2, inside % 32 // 2
        if form == "w8":
            word, shift = 16 * (inside // 64) + i, 8 * (j % 2) + 16 * e
        else:
            word, shift = i, 4 * j + 16 * e if form == "w4" else 8 * j + 4 * e
        found = int(packed[row // 64, tile, row % 64, word]) >> shift
        assert found & (255 if form == "w8" else 15) == u[row, column]


def test_scales_of_rows_eight_apart_are_neighbours() -> None:
    source = torch.arange(N * 5, dtype=torch.float32).view(N, 5)
    packed = layout.pack_groups(source, 6)
    assert packed.shape == (3, 6, 64)
    for row in (0, 7, 8, 15, 16, 40, 63, 64, 129):
        inside = row % 64
        place = inside // 16 * 16 + inside % 8 * 2 + inside % 16 // 8
        assert torch.equal(packed[row // 64, :5, place], source[row])
    assert (packed[:, 5] == 0).all()
    assert torch.equal(layout.unpack_groups(packed, N, 5), source)


def test_the_one_scale_of_a_row_is_repeated() -> None:
    source = torch.randn(N, 1)
    packed = layout.pack_groups(source, 3)
    assert torch.equal(layout.unpack_groups(packed, N, 3), source.expand(N, 3))


def test_words_of_a_table_are_the_bytes_of_its_bf16_values() -> None:
    table = torch.randn(16)
    words = layout.table_words(table)
    assert torch.equal(words[:16], table)
    octets = words[16:].contiguous().view(torch.uint8).to(torch.int32)
    values = (octets[:16] << 8 | octets[16:]).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(values, table.bfloat16())


def test_taking_over_changes_no_bit(made: Any, kind: Any) -> None:
    form = made.form(kind, 70)
    weight = weights.take_over(form, made.cpu)
    got = weights.originals(weight)
    assert weight.shape == form.shape
    assert weight.kind == form.kind
    arrays = {name: as_tensor(array) for name, array in form.arrays.items()}
    mins = arrays.pop("mins", None)
    for name, array in arrays.items():
        expected = array.expand_as(got[name])  # a row's one scale stands there repeatedly
        assert torch.equal(got[name], expected), name
        assert got[name].dtype == array.dtype
    if mins is not None:
        zero_points = mins.dtype is torch.uint8
        expected = -(arrays["scales"].float() * mins.float()) if zero_points else mins.float()
        assert torch.equal(got["mins"], expected)


def test_order_of_columns_is_kept(made: Any, kinds: Any) -> None:
    form = made.form(kinds["w4 g64 f16"], 64)
    order = torch.randperm(form.shape[1]).int()
    ordered = GroupInt(4, 64, form.codes, form.scales, None, form.shape, columns=to_host(order))
    assert torch.equal(weights.take_over(ordered, made.cpu).columns, order)


def test_bytes_counted_are_those_held(made: Any, kinds: Any) -> None:
    form = made.form(kinds["lut g64 bf16"], 64)
    assert isinstance(form, Lut16)
    padded = 64 * 256
    assert weights.take_over(form, made.cpu).nbytes == padded // 2 + padded // 64 * 2 + 24 * 4


def test_large_codes_are_rearranged_in_pieces(
    made: Any, kinds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = made.form(kinds["w4 g128 bf16"], 200)
    whole = weights.take_over(form, made.cpu)
    monkeypatch.setattr(weights, "PIECE_BYTES", 20000)
    assert torch.equal(weights.take_over(form, made.cpu).codes, whole.codes)


def test_no_piece_is_held_while_the_next_is_rearranged(
    made: Any, kinds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, pieces, alive = weights.PACK["w4"], list[weakref.ref[torch.Tensor]](), list[int]()

    def noted(codes: torch.Tensor) -> torch.Tensor:
        alive.append(sum(piece() is not None for piece in pieces))
        pieces.append(weakref.ref(packed := pack(codes)))
        return packed

    monkeypatch.setitem(weights.PACK, "w4", noted)
    monkeypatch.setattr(weights, "PIECE_BYTES", 1)
    weights.take_over(made.form(kinds["w4 g128 bf16"], 200), made.cpu)
    assert alive == [0] * 4
