"""Linears of decode steps in the interpreter against float64, over all forms and numbers of rows.

What must not be read or written is not a number, so a wrong access shows.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmrun.kernels.gpu import linear, weights
from llmrun.kernels.gpu.arrays import SMALL, Factor, Fold, Workspace
from llmrun.kernels.gpu.heuristics import Launch, Shape, Tuned
from llmrun.kernels.ops import CLAMP, CLAMP_SLOPE

pytestmark = pytest.mark.thorough

TIGHT = 2e-6
"""Relative error: sums are fp32 and products exact."""


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def split(weight: Any, n: int, parts: int, pair: bool = False) -> Tuned:
    """Measured launches that cut a weight's columns into parts."""
    shape = Shape(weight.form, weight.group, n, weight.shape[1], pair)
    return {(90, shape): Launch(parts, (2, 2, 2))}


def factors(x: torch.Tensor, factor: Factor) -> torch.Tensor:
    return torch.rsqrt(x.double().square().sum(1, keepdim=True) / factor.k + factor.eps)


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 32])
def test_every_form_equals_its_formula(made: Any, kind: Any, m: int) -> None:
    n = 67
    form = made.form(kind, n)
    x = made.prepared(made.inputs(m, kind.k))
    y = made.poison(SMALL + 1, n)
    work = made.work()
    linear.linears(x, None, [(weights.take_over(form, made.cpu), None)], y, m, work)
    want = x.u[:m, : kind.k].double() @ made.weight64(form).t()
    assert error(y[:m], want) < TIGHT
    assert y[m:].isnan().all()
    assert (work.counters == 0).all()


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128, 200])
def test_any_number_of_rows_of_a_weight(made: Any, kinds: Any, n: int) -> None:
    for name in ("w4 g32 f32", "bf16 odd"):
        form = made.form(kinds[name], n)
        x = made.prepared(made.inputs(3, kinds[name].k))
        y = made.poison(SMALL, n + 1)
        weight = weights.take_over(form, made.cpu)
        linear.linears(x, None, [(weight, None)], y[:, :n], 3, made.work())
        assert error(y[:3, :n], x.u[:3, : kinds[name].k].double() @ made.weight64(form).t()) < TIGHT
        assert y[:, n:].isnan().all()


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_the_columns_add_up_and_leave_the_counters_at_zero(
    made: Any, kinds: Any, parts: int
) -> None:
    for name in ("w4 g128 bf16", "w8 g16 f32", "bf16"):
        form = made.form(kinds[name], 130)
        weight = weights.take_over(form, made.cpu)
        x = made.prepared(made.inputs(2, kinds[name].k))
        y, work = made.poison(SMALL, 130), made.work()
        work.partials.fill_(float("nan"))
        tuned = split(weight, 130, parts)
        for _ in range(2):
            linear.linears(x, None, [(weight, None)], y, 2, work, tuned)
            want = x.u[:2, : kinds[name].k].double() @ made.weight64(form).t()
            assert error(y[:2], want) < TIGHT
            assert (work.counters == 0).all()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("first", "last"), [(1, 8), (9, 16), (17, 32)])
def test_a_rows_bits_do_not_depend_on_the_others(
    made: Any, kinds: Any, first: int, last: int, parts: int
) -> None:
    # Within one tile of rows: the interpreter's product sums in an order that depends on the size.
    for name in ("w4 g32 f16 +min f16", "lut g64 bf16", "f16"):
        form = made.form(kinds[name], 64)
        weight = weights.take_over(form, made.cpu)
        inputs = made.inputs(SMALL, kinds[name].k)
        factor = Factor(kinds[name].k, 1e-6)
        rows = []
        for m in range(first, last + 1, max(1, (last - first) // 3)):
            y = made.poison(SMALL, 64)
            x = made.prepared(torch.cat((inputs[:1], inputs[SMALL - m + 1 :])))
            tuned = split(weight, 64, parts)
            linear.linears(x, factor, [(weight, None)], y, m, made.work(), tuned)
            rows.append(y[0])
        assert all(torch.equal(rows[0], row) for row in rows)


@pytest.mark.parametrize("biased", [False, True])
def test_queries_keys_and_values_side_by_side(made: Any, kinds: Any, biased: bool) -> None:
    sizes, kind = (130, 64, 70), kinds["w4 g128 bf16"]
    forms = [made.form(kind, n, seed=n) for n in sizes]
    biases = [torch.randn(n) if biased else None for n in sizes]
    x, factor = made.inputs(5, kind.k), Factor(kind.k, 1e-5)
    prepared = made.prepared(x)
    y = made.poison(SMALL, sum(sizes))
    parts = [(weights.take_over(f, made.cpu), b) for f, b in zip(forms, biases, strict=True)]
    linear.linears(prepared, factor, parts, y, 5, made.work())
    w = torch.cat([made.weight64(form) for form in forms])
    want = factors(x, factor) * (prepared.u[:5, : kind.k].double() @ w.t())
    if biased:
        want += torch.cat([bias for bias in biases if bias is not None]).double()
    assert error(y[:5], want) < TIGHT
    assert y[5:].isnan().all()


def test_sums_of_parts_with_padding_stay_in_the_workspace(made: Any, kinds: Any) -> None:
    kind, room = kinds["w4 g128 bf16"], 2 * SMALL * 256  # for two parts of 195 rows, not of 3 x 128
    forms = [made.form(kind, 65, seed=i) for i in range(3)]
    parts = [(weights.take_over(form, made.cpu), None) for form in forms]
    x, y = made.prepared(made.inputs(17, kind.k)), made.poison(SMALL, 195)
    whole = made.poison(1, 2 * room)[0]
    work = Workspace(whole[:room], made.work().counters)
    linear.linears(x, None, parts, y, 17, work, split(parts[0][0], 195, 2))
    assert whole[room:].isnan().all()
    w = torch.cat([made.weight64(form) for form in forms])
    assert error(y[:17], x.u[:17, : kind.k].double() @ w.t()) < TIGHT


def test_parts_of_different_forms_and_more_than_three(made: Any, kinds: Any) -> None:
    names = ("w4 g128 bf16", "w4 g128 bf16 +zero", "w8 g128 bf16", "w8 g128 bf16")
    names += ("w8 g128 bf16", "w8 g128 bf16", "lut g128 f16")
    k = 128
    forms = [
        made.form(type(kinds[name])(**{**vars(kinds[name]), "k": k}), 40 + i, seed=i)
        for i, name in enumerate(names)
    ]
    parts = [(weights.take_over(form, made.cpu), None) for form in forms]
    x = made.prepared(made.inputs(2, k))
    y = made.poison(SMALL, sum(form.shape[0] for form in forms))
    linear.linears(x, None, parts, y, 2, made.work())
    w = torch.cat([made.weight64(form) for form in forms])
    assert error(y[:2], x.u[:2, :k].double() @ w.t()) < TIGHT


@pytest.mark.parametrize(
    ("m", "parts", "biased", "folded"),
    [(1, 1, False, False), (3, 2, True, True), (17, 1, True, True)],
)
def test_linear_add_and_the_inputs_of_what_follows(
    made: Any, kinds: Any, m: int, parts: int, biased: bool, folded: bool
) -> None:
    n, kind = 150, kinds["w8 g64 bf16 +min bf16"]
    form = made.form(kind, n)
    weight = weights.take_over(form, made.cpu)
    x = made.prepared(made.inputs(m, kind.k))
    h = made.poison(SMALL, n)
    h[:m] = before = torch.randn(m, n)
    bias = torch.randn(n) if biased else None
    fold = Fold(torch.randn(n), 1.0) if folded else None
    onto = made.poisoned(n)
    tuned = split(weight, n, parts)
    linear.linear_add(x, weight, bias, 0.75, h, m, onto, fold, made.work(), tuned)
    product = x.u[:m, : kind.k].double() @ made.weight64(form).t()
    want = before.double() + 0.75 * (product if bias is None else product + bias.double())
    assert error(h[:m], want) < TIGHT
    assert h[m:].isnan().all()
    check_prepared(onto, h[:m], fold)


def check_prepared(onto: Any, x: torch.Tensor, fold: Fold | None) -> None:
    """``onto`` is what ``arrays.Prepared`` says of x [m, K], and untouched behind m."""
    m, k = x.shape
    u = x if fold is None else x * (fold.gamma + fold.offset)
    torch.testing.assert_close(onto.u[:m, :k], u.bfloat16(), rtol=2**-7, atol=0)
    assert (onto.u[:, k:] == 0).all()
    wide = torch.zeros(m, math.ceil(k / 64) * 64, dtype=torch.float64)
    wide[:, :k] = x.double()
    squares = wide.view(m, -1, 64).square().sum(-1)
    torch.testing.assert_close(onto.squares[:m].double(), squares, rtol=1e-5, atol=1e-6)
    assert onto.u[m:, :k].isnan().all()
    assert onto.squares[m:].isnan().all()


def test_linear_add_without_what_follows(made: Any, kinds: Any) -> None:
    form = made.form(kinds["bf16"], 64)
    x = made.prepared(made.inputs(1, kinds["bf16"].k))
    h = torch.zeros(SMALL, 64)
    weight = weights.take_over(form, made.cpu)
    linear.linear_add(x, weight, None, 1.0, h, 1, None, None, made.work())
    assert error(h[:1], x.u[:1, : kinds["bf16"].k].double() @ made.weight64(form).t()) < TIGHT


def activated(gate: torch.Tensor | None, up: torch.Tensor, activation: str) -> torch.Tensor:
    value = up if gate is None else gate
    if activation == "swiglu_clamped":
        value = value.clamp(max=CLAMP)
        return value * torch.sigmoid(CLAMP_SLOPE * value) * (up.clamp(-CLAMP, CLAMP) + 1)
    if activation == "silu":
        value = torch.nn.functional.silu(value)
    else:
        value = torch.nn.functional.gelu(value, approximate="tanh")
    return value if gate is None else value * up


@pytest.mark.parametrize(
    ("gate_name", "activation", "parts"),
    [
        ("w4 g128 bf16", "silu", 1),
        ("w4 g128 bf16", "gelu_tanh", 2),
        ("w4 g128 bf16", "swiglu_clamped", 1),
        ("w8 g128 bf16", "silu", 2),
        (None, "gelu_tanh", 1),
        (None, "silu", 2),
    ],
)
def test_gate_and_up(
    made: Any, kinds: Any, gate_name: str | None, activation: str, parts: int
) -> None:
    k, n, m = 384, 70, 3
    kind = kinds["w4 g128 bf16"]
    up = made.form(kind, n, seed=1)
    weight = weights.take_over(up, made.cpu)
    x, factor = 4 * made.inputs(m, k), Factor(k, 1e-5)
    prepared = made.prepared(x)
    u = factors(x, factor) * prepared.u[:m, :k].double()
    bias = torch.randn(n)
    values = u @ made.weight64(up).t() + bias.double()
    gate = opened = None
    if gate_name is not None:
        gate_kind = kinds[gate_name]
        form = made.form(type(gate_kind)(**{**vars(gate_kind), "k": k}), n, seed=2)
        gate = (weights.take_over(form, made.cpu), torch.randn(n))
        opened = u @ made.weight64(form).t() + gate[1].double()
    a, onto = made.poison(SMALL, n), made.poisoned(n)
    work = made.work()
    tuned = split(weight, n, parts, gate_name == "w4 g128 bf16")
    linear.gate_up(prepared, factor, gate, (weight, bias), activation, a, onto, m, work, tuned)
    assert error(a[:m], activated(opened, values, activation)) < 5e-6
    assert a[m:].isnan().all()
    assert (work.counters == 0).all()
    check_prepared(onto, a[:m], None)


@pytest.mark.parametrize("vocab", [None, 150, 131, 128, 3])
@pytest.mark.parametrize(
    ("name", "softcap", "parts"),
    [("w8 g128 bf16", None, 1), ("bf16", 5.0, 2), ("w4 row f32", None, 1)],
)
def test_head_of_picked_rows(
    made: Any, kinds: Any, name: str, softcap: float | None, parts: int, vocab: int | None
) -> None:
    n, kind = 150, kinds[name]
    form = made.form(kind, n)
    weight = weights.take_over(form, made.cpu)
    x, factor = made.inputs(9, kind.k), Factor(kind.k, 1e-6)
    prepared = made.prepared(x)
    rows = torch.tensor([7, 0, 8, 99], dtype=torch.int32)  # the last is not in use
    logits, work = made.poison(SMALL, n), made.work()
    best = None if vocab is None else poisoned_best(4, n, vocab)
    linear.head(
        prepared, factor, weight, rows, 3, 0.5, softcap, logits, best, work,
        tuned=split(weight, n, parts),
    )  # fmt: skip
    u = factors(x, factor) * prepared.u[:9, : kind.k].double()
    want = 0.5 * (u @ made.weight64(form).t())[rows[:3].long()]
    if softcap is not None:
        want = softcap * torch.tanh(want / softcap)
    assert error(logits[:3], want) < 5e-6
    assert logits[3:].isnan().all()
    if best is not None:
        check_best(best, logits[:3])


def poisoned_best(rows: int, n: int, vocab: int) -> linear.Best:
    best = replace(linear.Best.empty(rows, n, torch.device("cpu")), vocab=vocab)
    for part in (best.values, best.sums, best.ids):
        part.fill_(99)
    return best


def check_best(best: linear.Best, logits: torch.Tensor) -> None:
    """Against float64, for finite logits; rows behind them were left alone."""
    for r, row in enumerate(logits.double()):
        for tile, part in enumerate(row[: best.vocab].split(64)):
            assert best.values[r, tile] == part.max()
            assert best.ids[r, tile] == 64 * tile + int((part == part.max()).nonzero()[0])
            assert math.isclose(best.sums[r, tile], (part - part.max()).exp().sum(), rel_tol=2e-6)
    for left_alone in (best.values, best.sums, best.ids):
        assert (left_alone[len(logits) :] == 99).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_best_takes_the_lowest_of_equals_and_tells_what_is_not_finite(
    made: Any, kinds: Any, bad: float
) -> None:
    n, vocab, kind = 320, 250, kinds["f32"]
    weight = weights.take_over(made.form(kind, n), made.cpu)
    weight.codes[10] = weight.codes[20] = 100.0
    weight.codes[130] = bad
    weight.codes[240] = weight.codes[249] = 100.0
    weight.codes[vocab:] = math.nan  # padding may hold anything
    x = made.prepared(torch.ones(2, kind.k))
    logits, best = made.poison(SMALL, n), poisoned_best(2, n, vocab)
    rows = torch.zeros(SMALL, dtype=torch.int32)
    linear.head(x, None, weight, rows, 1, 1.0, None, logits, best, made.work())
    assert best.ids[0, [0, 3]].tolist() == [10, 240]
    assert best.values[0, :4].isnan().tolist() == [False, False, True, False]
    assert 128 <= int(best.ids[0, 2]) < 192  # it is fed before anybody looks
    assert math.isclose(best.sums[0, 0], 2.0, rel_tol=1e-6)
    assert math.isclose(best.sums[0, 3], 2.0, rel_tol=1e-6)
