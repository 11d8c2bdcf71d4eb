"""Row kernels in the interpreter against formulas in float64."""

import pytest
import torch
from torch.nn import functional

from llmrun.kernels.gpu import rows
from llmrun.kernels.gpu.arrays import SMALL, TILE_N, Fold, Prepared
from llmrun.kernels.ops import CLAMP, CLAMP_SLOPE, Norm

pytestmark = pytest.mark.thorough

COLUMNS = [16, 72, 700, 1100]
EPS = 1e-5


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def poisoned(k: int) -> Prepared:
    onto = Prepared.empty(k, torch.device("cpu"))
    for part in (onto.u[:, :k], onto.squares):
        part.fill_(float("nan"))
    return onto


def norm_of(k: int, *, centered: bool = False, offset: float = 0.0) -> Norm:
    beta = randn(k, seed=8) if centered else None
    return Norm(randn(k, seed=7), EPS, offset, centered, beta)


def finished(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x, gamma = x.double(), norm.gamma.double() + norm.offset
    if norm.centered:
        assert norm.beta is not None
        return functional.layer_norm(x, x.shape[-1:], gamma, norm.beta.double(), norm.eps)
    return functional.rms_norm(x, x.shape[-1:], gamma, norm.eps)


def assert_rounded(got: torch.Tensor, want: torch.Tensor, atol: float = 1e-6) -> None:
    """bf16 is within half a unit in the last place, or a hair more where fp32 was in between."""
    half = 2 ** torch.floor(torch.log2(want.abs() + 1e-30)) * 2**-8
    assert ((got.double() - want).abs() <= half * 1.01 + atol).all()


def assert_prepared(onto: Prepared, m: int, u: torch.Tensor, x: torch.Tensor | None) -> None:
    """Rows below m hold u and the squares of x; others nothing new."""
    k = u.shape[1]
    assert_rounded(onto.u[:m, :k], u)
    assert onto.u[m:, :k].isnan().all()
    assert (onto.u[:, k:] == 0).all()
    if x is not None:
        squares = functional.pad(x.double() ** 2, (0, -k % TILE_N)).unflatten(1, (-1, TILE_N))
        torch.testing.assert_close(onto.squares[:m].double(), squares.sum(-1), rtol=1e-5, atol=1e-6)
        assert onto.squares[m:].isnan().all()


@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_prepare_folds_gamma_and_leaves_the_factor_out(k: int, offset: float | None) -> None:
    x, onto = randn(5, k), poisoned(k)
    norm = None if offset is None else norm_of(k, offset=offset)
    rows.prepare(x, norm, onto, 3)
    u = x[:3].double() * (1.0 if norm is None else norm.gamma.double() + norm.offset)
    assert_prepared(onto, 3, u, x[:3])


@pytest.mark.slow
@pytest.mark.parametrize("k", COLUMNS)
def test_prepare_finishes_a_centered_norm(k: int) -> None:
    x, onto, norm = randn(5, k) + 3, poisoned(k), norm_of(k, centered=True)
    rows.prepare(x, norm, onto, 5)
    assert_prepared(onto, 5, finished(x, norm), None)


@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("centered", [False, True])
def test_norm_add_prepares_the_new_states(k: int, centered: bool) -> None:
    x, h, norm = randn(4, k), randn(4, k, seed=1), norm_of(k, centered=centered)
    old, onto = h.clone(), poisoned(k)
    rows.norm_add(x, norm, 0.5, h, 3, onto, Fold(randn(k, seed=2), 1.0))
    want = old.double() + 0.5 * finished(x, norm)
    torch.testing.assert_close(h[:3].double(), want[:3], rtol=1e-5, atol=1e-5)
    assert torch.equal(h[3], old[3])
    folded = h[:3].double() * (randn(k, seed=2).double() + 1)
    assert_prepared(onto, 3, folded, h[:3])


def test_norm_add_needs_no_consumer() -> None:
    x, h, norm = randn(2, 72), randn(2, 72, seed=1), norm_of(72)
    want = h.double() + finished(x, norm)
    rows.norm_add(x, norm, 1.0, h, 2, None, None)
    torch.testing.assert_close(h.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", COLUMNS)
def test_permute_gathers_columns_and_keeps_squares(k: int) -> None:
    x, source, onto = randn(3, k), poisoned(k), poisoned(k)
    rows.prepare(x, None, source, 3)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(3))
    rows.permute(source, order.int(), onto, 3)
    assert torch.equal(onto.u[:3, :k], source.u[:3, order])
    assert_prepared(onto, 3, source.u[:3, order].double(), None)
    assert torch.equal(onto.squares[:3], source.squares[:3])


@pytest.mark.parametrize("k", [16, 700, 4100])
@pytest.mark.parametrize("centered", [None, False, True])
def test_normed_rounds_once(k: int, centered: bool | None) -> None:
    x, out = randn(3, k) * 4 + 1, torch.full((3, k), float("nan"), dtype=torch.bfloat16)
    norm = None if centered is None else norm_of(k, centered=centered, offset=0.25)
    rows.normed(x, norm, out)
    assert_rounded(out, x.double() if norm is None else finished(x, norm))


def activated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=CLAMP)
    return gate * torch.sigmoid(CLAMP_SLOPE * gate) * (up.clamp(-CLAMP, CLAMP) + 1)


@pytest.mark.parametrize("k", [72, 4100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_gated_reads_columns_of_one_tensor(k: int, dtype: torch.dtype, activation: str) -> None:
    both, out = randn(3, 2 * k) * 6, torch.full((3, k), float("nan"), dtype=dtype)
    rows.gated(both[:, :k], both[:, k:], activation, out)
    want = activated(both[:, :k].double(), both[:, k:].double(), activation)
    if dtype == torch.bfloat16:  # factors up to 20, each with a few roundings of fp32
        assert_rounded(out, want, 5e-5)
    else:
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_without_a_gate_activates_up(activation: str) -> None:
    up, out = randn(2, 72), torch.empty(2, 72)
    rows.gated(None, up, activation, out)
    want = activated(up.double(), torch.ones(2, 72).double(), activation)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    x, norm = randn(SMALL, 700), norm_of(700, centered=True)
    one, all_rows = poisoned(700), poisoned(700)
    rows.prepare(x, norm, one, 1)
    rows.prepare(x, norm, all_rows, SMALL)
    assert torch.equal(one.u[0], all_rows.u[0])
    assert torch.equal(one.squares[0], all_rows.squares[0])
