"""The int8 cache against its formula in float64, and attention over it."""

import pytest
import torch

from llmrun.kernels.ops import Attention, Heads, Span
from llmrun.kernels.reference import attention
from llmrun.kernels.reference.step import TorchKvLayer, TorchStep, kv_layer

CPU = torch.device("cpu")


def appended(heads: Heads, n: int) -> tuple[TorchStep, torch.Tensor, TorchKvLayer]:
    width = (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim
    y = torch.randn(n, width, generator=torch.Generator().manual_seed(1))
    y[1] *= 1e-3
    y[2] = 0
    step, kv = TorchStep(n, CPU), kv_layer(2, 2 * n, heads, "int8", CPU)
    step.set([0] * n, [Span(1, 0, n, 0)], [])
    attention.rope_append(step, y, heads, None, None, None, kv)
    return step, y, kv


def formula(x: torch.Tensor, group: int) -> torch.Tensor:
    """Values [n, Hkv, dh] as the cache gives them back, float64."""
    parts = x.double().unflatten(-1, (-1, group))
    scales = (parts.abs().amax(-1, keepdim=True) / 127).half().double()
    codes = torch.where(scales > 0, parts / scales, 0).round().clamp(-127, 127)
    return (codes * scales).flatten(-2)


@pytest.mark.parametrize(("head_dim", "group"), [(128, 64), (64, 64), (80, 80)])
def test_int8_cache_holds_the_formula(head_dim: int, group: int) -> None:
    heads = Heads(2, 3, head_dim)
    _, y, kv = appended(heads, 5)
    parts = y.view(5, 8, head_dim)
    for got, want in zip(kv.read(1, slice(0, 5)), (parts[:, 2:5], parts[:, 5:]), strict=True):
        torch.testing.assert_close(got.transpose(0, 1).double(), formula(want, group))
        error = (got.transpose(0, 1) - want).abs().amax(-1)
        assert (error <= want.abs().amax(-1) / 127 * 0.55 + 1e-7).all()
    assert kv.keys.dtype == torch.int8
    assert kv.nbytes == 2 * 2 * 10 * 3 * (head_dim + 2 * head_dim // group)


def test_attention_over_int8_is_that_over_what_it_holds() -> None:
    heads = Heads(4, 2, 64)
    step, y, kv = appended(heads, 6)
    o = torch.empty(6, 4 * 64)
    attention.attend(step, y, Attention(heads, 0.125), kv, o)
    parts = y.view(6, 8, 64)
    keys, values = (formula(parts[:, i : i + 2], 64).repeat_interleave(2, 1) for i in (4, 6))
    scores = torch.einsum("thd,shd->hts", parts[:, :4].double(), keys) * 0.125
    scores.masked_fill_(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    want = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
    torch.testing.assert_close(o.double().view(6, 4, 64), want, rtol=1e-5, atol=1e-6)
