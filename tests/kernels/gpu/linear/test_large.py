"""Linears of long steps in the interpreter: weights dequantized in blocks, products and sums."""

from typing import Any

import pytest
import torch

from llmrun.kernels import cuda
from llmrun.kernels.forms import GroupInt
from llmrun.kernels.gpu import large, weights
from llmrun.kernels.reference.arrays import to_host

pytestmark = pytest.mark.thorough

ROUNDED = 2e-3
"""Relative error where weights are rounded to bf16."""


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_every_form_is_dequantized_and_rounded_once(made: Any, kind: Any) -> None:
    form = made.form(kind, 70)
    weight = weights.take_over(form, made.cpu)
    scratch = large.Scratch(made.cpu)
    scratch.take(70, kind.k).fill_(float("nan"))
    found = torch.cat([rows.clone() for _, rows in large.blocks(weight, scratch)])
    want = made.weight64(form)
    assert found.shape == want.shape
    # Half a unit of bf16, and what fp32 loses where a minimum nearly cancels the product.
    slack = want.abs() * 2**-8 + 3e-5
    assert ((found.double() - want).abs() <= slack).all()


@pytest.mark.parametrize("tokens", [33, 50])
def test_product_bias_and_sum(made: Any, kind: Any, tokens: int) -> None:
    n = 70
    form = made.form(kind, n)
    weight = weights.take_over(form, made.cpu)
    x = made.inputs(tokens, kind.k).bfloat16()
    bias = torch.randn(n)
    want = x.double() @ made.weight64(form).t() + bias.double()
    scratch = large.Scratch(made.cpu)
    y = made.poison(tokens, n + 3)
    large.multiply(x, weight, bias, y[:, 2:-1], scratch)
    assert error(y[:, 2:-1], want) < ROUNDED
    assert y[:, :2].isnan().all()
    assert y[:, -1].isnan().all()
    before = y.clone()
    large.multiply(x, weight, bias, y[:, 2:-1], scratch, add=-0.5)
    assert error(y[:, 2:-1], before[:, 2:-1].double() - 0.5 * want) < ROUNDED


def test_blocks_of_rows_share_the_scratch(
    made: Any, kinds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("w8 g32 f16", "f16"):
        form = made.form(kinds[name], 200)
        weight = weights.take_over(form, made.cpu)
        monkeypatch.setattr(large, "SCRATCH_WEIGHTS", kinds[name].k * 130)
        starts = [start for start, _ in large.blocks(weight, large.Scratch(made.cpu))]
        assert starts == [0, 128]
        x = made.inputs(34, kinds[name].k).bfloat16()
        y = made.poison(34, 200)
        large.multiply(x, weight, None, y, large.Scratch(made.cpu))
        assert error(y, x.double() @ made.weight64(form).t()) < ROUNDED


def test_columns_in_an_order_of_their_own(made: Any, kinds: Any) -> None:
    form = made.form(kinds["w4 g64 f16"], 64)
    order = torch.randperm(form.shape[1])
    columns = to_host(order.int())
    ordered = GroupInt(4, 64, form.codes, form.scales, None, form.shape, columns=columns)
    x = made.inputs(33, form.shape[1]).bfloat16()
    y = made.poison(33, 64)
    weight = weights.take_over(ordered, made.cpu)
    large.multiply(x, weight, None, y, large.Scratch(made.cpu))
    assert error(y, x.double()[:, order] @ made.weight64(form).t()) < ROUNDED


def test_memory_is_planned_for_as_much_as_is_dequantized_at_a_time() -> None:
    assert cuda.BLOCK_WEIGHTS == large.SCRATCH_WEIGHTS
