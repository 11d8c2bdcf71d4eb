"""Embedding rows of every form in the interpreter, and the prepared inputs they become."""

from typing import Any

import pytest
import torch

from llmrun.errors import UnavailableError
from llmrun.kernels.forms import GroupInt
from llmrun.kernels.gpu import embedding, weights
from llmrun.kernels.gpu.arrays import SMALL, Fold
from llmrun.kernels.reference.arrays import to_host

pytestmark = pytest.mark.thorough

IDS = torch.tensor([69, 0, 63, 64, 7, 69, 16, 41], dtype=torch.int32)


def test_rows_of_every_form(made: Any, kind: Any) -> None:
    form = made.form(kind, 70)
    weight = weights.take_over(form, made.cpu)
    h = made.poison(len(IDS), kind.k)
    slots = torch.zeros(len(IDS), dtype=torch.int32)
    embedding.embed_rows(weight, IDS, slots, 2.0, h, None, None, len(IDS))
    want = 2 * made.weight64(form)[IDS.long()]
    torch.testing.assert_close(h.double(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["w8 g128 bf16", "bf16 odd", "lut g32 f32"])
@pytest.mark.parametrize("folded", [False, True])
def test_rows_as_inputs_of_the_next_linear(made: Any, kinds: Any, name: str, folded: bool) -> None:
    kind = kinds[name]
    k, m = kind.k, 4
    weight = weights.take_over(made.form(kind, 70), made.cpu)
    slots = torch.tensor([0, -1, 0, 2, 5], dtype=torch.int32)
    h, onto = made.poison(SMALL, k), made.poisoned(k)
    fold = Fold(torch.randn(k), 1.0) if folded else None
    embedding.embed_rows(weight, IDS, slots, 1.0, h, onto, fold, m)
    used = [0, 2, 3]
    unused = [row for row in range(SMALL) if row not in used]
    for array in (h, onto.u[:, :k], onto.squares):
        assert not array[used].isnan().any()
        assert array[unused].isnan().all()
    u = h if fold is None else h * (fold.gamma + 1.0)
    torch.testing.assert_close(onto.u[used, :k], u[used].bfloat16(), rtol=2**-7, atol=0)
    assert (onto.u[:, k:] == 0).all()
    wide = torch.zeros(len(used), onto.squares.shape[1] * 64)
    wide[:, :k] = h[used]
    squares = wide.view(len(used), -1, 64).square().sum(-1)
    torch.testing.assert_close(onto.squares[used], squares, rtol=1e-5, atol=1e-6)


def test_reordered_columns_are_refused(made: Any, kinds: Any) -> None:
    form = made.form(kinds["w4 g64 f16"], 64)
    columns = to_host(torch.randperm(form.shape[1]).int())
    ordered = GroupInt(4, 64, form.codes, form.scales, None, form.shape, columns=columns)
    weight = weights.take_over(ordered, made.cpu)
    with pytest.raises(UnavailableError, match="reordered"):
        embedding.embed_rows(weight, IDS, IDS, 1.0, made.poison(8, form.shape[1]), None, None, 1)
