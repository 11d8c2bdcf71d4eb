"""Every op against a formula in float64 or torch's own function, written independently."""

import math

import pytest
import torch
from torch.nn import functional

from llmrun.errors import DoesNotFitError
from llmrun.kernels.forms import Dense
from llmrun.kernels.ops import Attention, Backend, Expert, Heads, Linear, Norm, Rope, Span
from llmrun.kernels.reference import attention as attention_ops
from llmrun.kernels.reference.arrays import to_host


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(backend: Backend, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    held = backend.weight(Dense(to_host(weight)))
    return Linear(held, None if bias is None else backend.vector(to_host(bias)))


def normed(x: torch.Tensor, gamma: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * gamma.double()


def step_of(backend: Backend, n: int, spans: list[Span], rows: list[int]) -> object:
    step = backend.step(64)
    step.set(list(range(n)), spans, rows)
    return step


def one_span(backend: Backend, n: int, position: int = 0, rows: list[int] | None = None) -> object:
    return step_of(backend, n, [Span(0, 0, n, position)], rows or [])


@pytest.mark.parametrize("n_tokens", [1, 2, 33])
def test_norm_linear_concatenates(backend: Backend, n_tokens: int) -> None:
    x, gamma = randn(n_tokens, 48, seed=1), randn(48, seed=2)
    weights = [randn(n, 48, seed=n) for n in (24, 8, 8)]
    bias = randn(24, seed=9)
    linears = [linear(backend, weights[0], bias)] + [linear(backend, w) for w in weights[1:]]
    y = torch.full((64, 40), float("nan"))
    norm = Norm(gamma, 1e-6)
    backend.norm_linear(one_span(backend, n_tokens), x, norm, linears, y)
    want = normed(x, gamma) @ torch.cat(weights).double().t()
    want[:, :24] += bias.double()
    torch.testing.assert_close(y[:n_tokens].double(), want, rtol=1e-5, atol=1e-5)
    assert y[n_tokens:].isnan().all()


def test_norm_offset_adds_one(backend: Backend) -> None:
    x, gamma, weight = randn(3, 16), randn(16, seed=1), torch.eye(16)
    y = torch.empty(3, 16)
    norm = Norm(gamma, 1e-6, offset=1.0)
    backend.norm_linear(one_span(backend, 3), x, norm, [linear(backend, weight)], y)
    torch.testing.assert_close(y.double(), normed(x, gamma + 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beta", [None, randn(16, seed=3)], ids=["", "beta"])
def test_a_centered_norm_is_layer_norm(backend: Backend, beta: torch.Tensor | None) -> None:
    x, gamma, y = randn(3, 16) + 2, randn(16, seed=1), torch.empty(3, 16)
    norm = Norm(gamma, 1e-3, centered=True, beta=beta)
    backend.norm_linear(one_span(backend, 3), x, norm, [linear(backend, torch.eye(16))], y)
    want = functional.layer_norm(
        x.double(), (16,), gamma.double(), None if beta is None else beta.double(), 1e-3
    )
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_beta_is_added_behind_the_offset(backend: Backend) -> None:
    x, gamma, beta, y = randn(3, 16), randn(16, seed=1), randn(16, seed=2), torch.empty(3, 16)
    norm = Norm(gamma, 1e-6, offset=1.0, beta=beta)
    backend.norm_linear(one_span(backend, 3), x, norm, [linear(backend, torch.eye(16))], y)
    want = normed(x, gamma + 1) + beta.double()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_without_a_norm_h_is_taken_as_it_is(backend: Backend) -> None:
    x, weight, y, a = randn(3, 16), randn(8, 16, seed=1), torch.empty(3, 8), torch.empty(3, 8)
    held, step = linear(backend, weight), one_span(backend, 3)
    product = x.double() @ weight.double().t()
    backend.norm_linear(step, x, None, [held], y)
    torch.testing.assert_close(y.double(), product, rtol=1e-5, atol=1e-5)
    backend.norm_gate_up(step, x, None, held, held, "silu", a)
    want = product / (1 + torch.exp(-product)) * product
    torch.testing.assert_close(a.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_linear_add_with_and_without_post_norm(backend: Backend, scale: float) -> None:
    x, weight, h, gamma = randn(5, 32), randn(16, 32, seed=1), randn(5, 16, seed=2), randn(16)
    product = x.double() @ weight.double().t()
    for norm, want in ((None, product), (Norm(gamma, 1e-6), normed(product, gamma))):
        out = h.clone()
        backend.linear_add(one_span(backend, 5), x, linear(backend, weight), norm, out, scale)
        torch.testing.assert_close(out.double(), h.double() + scale * want, rtol=1e-5, atol=1e-5)


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation of gpt-oss: gate at most 7, up in [-7, 7], a slope of 1.702."""
    g = torch.minimum(gate, torch.tensor(7.0))
    u = torch.maximum(torch.minimum(up, torch.tensor(7.0)), torch.tensor(-7.0))
    return g / (1 + torch.exp(-1.702 * g)) * (u + 1)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_norm_gate_up(backend: Backend, activation: str) -> None:
    x, gamma = randn(7, 32), randn(32, seed=1)
    gate, up = randn(24, 32, seed=2), randn(24, 32, seed=3)
    a = torch.empty(64, 24)
    backend.norm_gate_up(
        one_span(backend, 7), x, Norm(gamma, 1e-6), linear(backend, gate), linear(backend, up),
        activation, a,
    )  # fmt: skip
    g, u = normed(x, gamma) @ gate.double().t(), normed(x, gamma) @ up.double().t()
    assert g.max() > 7  # the clamps are met
    assert u.abs().max() > 7
    want = clamped(g, u) if activation == "swiglu_clamped" else activated(g, activation) * u
    torch.testing.assert_close(a[:7].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_without_a_gate_up_is_activated(backend: Backend, activation: str) -> None:
    x, gamma, up = randn(7, 32), randn(32, seed=1), randn(24, 32, seed=3)
    bias, a = randn(24, seed=4), torch.empty(7, 24)
    backend.norm_gate_up(
        one_span(backend, 7), x, Norm(gamma, 1e-6), None, linear(backend, up, bias), activation, a
    )
    want = activated(normed(x, gamma) @ up.double().t() + bias.double(), activation)
    torch.testing.assert_close(a.double(), want, rtol=1e-5, atol=1e-5)


def test_the_clamped_activation_needs_a_gate(backend: Backend) -> None:
    held, a = linear(backend, torch.eye(16)), torch.empty(2, 16)
    with pytest.raises(ValueError, match="swiglu_clamped"):
        backend.norm_gate_up(
            one_span(backend, 2), randn(2, 16), None, None, held, "swiglu_clamped", a
        )


def test_moe_add_with_biases_scale_and_clamped_activation(backend: Backend) -> None:
    h, gamma = randn(6, 16), randn(16, seed=1)
    shapes = ((8, 16), (8, 16), (16, 8))
    parts = [
        [(4 * randn(*shape, seed=10 * e + i), randn(shape[0], seed=90 + 10 * e + i))
         for i, shape in enumerate(shapes)]
        for e in range(4)
    ]  # fmt: skip
    router, router_bias = randn(4, 16, seed=2), randn(4, seed=3)
    experts = [Expert(*(linear(backend, *part) for part in three)) for three in parts]
    out = h.clone()
    backend.moe_add(
        one_span(backend, 6), out, Norm(gamma, 1e-6), linear(backend, router, router_bias),
        experts, 3, True, "swiglu_clamped", 0.5,
    )  # fmt: skip
    x, want = normed(h, gamma), h.double()
    scores = x @ router.double().t() + router_bias.double()
    for token in range(6):
        best = torch.argsort(scores[token], descending=True)[:3]
        shares = torch.softmax(scores[token, best], dim=-1)  # what normalizing comes to
        for share, index in zip(shares, best.tolist(), strict=True):
            gate, up, down = ((w.double(), b.double()) for w, b in parts[index])
            inner = clamped(gate[0] @ x[token] + gate[1], up[0] @ x[token] + up[1])
            want[token] += 0.5 * share * (down[0] @ inner + down[1])
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)


def test_norm_head_caps_logits_behind_the_scale(backend: Backend) -> None:
    table, gamma, h = randn(64, 16), randn(16, seed=1), randn(4, 16, seed=2)
    logits = torch.empty(2, 64)
    step = step_of(backend, 4, [Span(0, 0, 4, 0)], [3, 0])
    backend.norm_head(step, h, Norm(gamma, 1e-6), linear(backend, table), 0.5, logits, 2.0)
    want = 2 * torch.tanh(normed(h[[3, 0]], gamma) @ table.double().t() * 0.5 / 2)
    torch.testing.assert_close(logits.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_moe_add(backend: Backend, normalize: bool) -> None:
    h, gamma, router = randn(6, 16), randn(16, seed=1), randn(5, 16, seed=2)
    tensors = [(randn(8, 16, seed=i), randn(8, 16, seed=i + 9), randn(16, 8, seed=i + 20))
               for i in range(5)]  # fmt: skip
    experts = [Expert(*(linear(backend, t) for t in three)) for three in tensors]
    out = h.clone()
    backend.moe_add(
        one_span(backend, 6), out, Norm(gamma, 1e-6), linear(backend, router), experts, 2,
        normalize, "silu",
    )  # fmt: skip
    x = normed(h, gamma)
    probabilities = torch.softmax(x @ router.double().t(), dim=-1)
    want = h.double()
    for token in range(6):
        best = torch.argsort(probabilities[token], descending=True)[:2]
        total = probabilities[token, best].sum() if normalize else 1.0
        for index in best.tolist():
            gate, up, down = (t.double() for t in tensors[index])
            inner = functional.silu(gate @ x[token]) * (up @ x[token])
            want[token] += probabilities[token, index] / total * (down @ inner)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_embed_scales_and_norm_head_takes_wanted_rows(backend: Backend) -> None:
    table, gamma = randn(64, 16), randn(16, seed=1)
    step = step_of(backend, 4, [Span(0, 0, 4, 0)], [3, 1])
    h = torch.empty(64, 16)
    backend.embed(step, backend.weight(Dense(to_host(table))), 2.0, h)
    assert torch.equal(h[:4], table[:4] * 2)
    logits = torch.full((4, 64), float("nan"))
    backend.norm_head(step, h, Norm(gamma, 1e-6), linear(backend, table), 0.5, logits)
    want = normed(table[[3, 1]] * 2, gamma) @ table.double().t() * 0.5
    torch.testing.assert_close(logits[:2].double(), want, rtol=1e-5, atol=1e-5)
    assert logits[2:].isnan().all()


HEADS = Heads(4, 2, 8)


def attention_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention
) -> torch.Tensor:
    """Softmax attention one query at a time: q, k, v [L, heads, dh] of a whole sequence."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for t in range(q.shape[0]):
        first = 0 if attention.window is None else max(0, t + 1 - attention.window)
        for head in range(HEADS.n_heads):
            keys = k[first : t + 1, head // 2].double()
            scores = keys @ q[t, head].double() * attention.scale
            if attention.softcap is not None:
                scores = attention.softcap * torch.tanh(scores / attention.softcap)
            exps = torch.exp(scores)
            total = exps.sum()
            if attention.sinks is not None:
                total = total + torch.exp(attention.sinks[head].double())
            out[t, head] = (exps / total) @ v[first : t + 1, head // 2].double()
    return out


CASES = {
    "plain": {},
    "window": {"window": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": randn(4, seed=77)},
    "window 1": {"window": 1},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunks", [[11], [1] * 11, [4, 1, 6]])
def test_attend_equals_attention_by_hand(backend: Backend, name: str, chunks: list[int]) -> None:
    attention = Attention(HEADS, 0.3, **CASES[name])
    y = randn(11, 8 * 8, seed=3)
    kv = backend.kv_layer(2, 16, HEADS, "f32")
    o = torch.full((11, 32), float("nan"))
    done = 0
    for count in chunks:
        step = step_of(backend, count, [Span(1, 0, count, done)], [])
        part = y[done : done + count].clone()
        backend.rope_append(step, part, HEADS, None, None, None, kv)
        backend.attend(step, part, attention, kv, o[done:])
        done += count
    parts = y.view(11, 8, 8)
    want = attention_by_hand(parts[:, :4], parts[:, 4:6], parts[:, 6:], attention)
    torch.testing.assert_close(o.view(11, 4, 8).double(), want, rtol=1e-5, atol=1e-5)


def test_two_sequences_in_one_step_equal_each_alone(backend: Backend) -> None:
    attention = Attention(HEADS, 0.3)
    y = randn(9, 64, seed=5)
    rope = Rope((1.0, 0.5, 0.25, 0.1))
    kv = backend.kv_layer(2, 16, HEADS, "f16")
    o = torch.empty(9, 32)
    together = y.clone()
    spans = [Span(0, 0, 6, 0), Span(1, 6, 3, 0)]
    step = step_of(backend, 9, spans, [])
    backend.rope_append(step, together, HEADS, rope, None, None, kv)
    backend.attend(step, together, attention, kv, o)
    for span in spans:
        alone = y[span.start : span.start + span.count].clone()
        other = backend.kv_layer(1, 16, HEADS, "f16")
        single = torch.empty(span.count, 32)
        step = step_of(backend, span.count, [Span(0, 0, span.count, 0)], [])
        backend.rope_append(step, alone, HEADS, rope, None, None, other)
        backend.attend(step, alone, attention, other, single)
        torch.testing.assert_close(o[span.start : span.start + span.count], single)


def test_rope_rotates_halves_by_position(backend: Backend) -> None:
    # Four rotated dimensions of eight: the rest passes through; angles by complex multiplication.
    rope = Rope((1.0, 0.25), attention_factor=1.5)
    y = randn(3, 64, seed=8)
    kv = backend.kv_layer(1, 64, HEADS, "f32")
    out = y.clone()
    backend.rope_append(one_span(backend, 3, position=20), out, HEADS, rope, None, None, kv)
    parts, got = y.view(3, 8, 8).double(), out.view(3, 8, 8).double()
    for t in range(3):
        angles = (20 + t) * torch.tensor([1.0, 0.25], dtype=torch.float64)
        turn = torch.polar(torch.full((2,), 1.5, dtype=torch.float64), angles)
        for head in range(6):
            z = torch.complex(parts[t, head, :2], parts[t, head, 2:4]) * turn
            torch.testing.assert_close(got[t, head, :2], z.real, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(got[t, head, 2:4], z.imag, rtol=1e-5, atol=1e-6)
        assert torch.equal(got[t, :6, 4:], parts[t, :6, 4:])
    assert torch.equal(kv.keys[0, :, 20:23].transpose(0, 1).double(), got[:, 4:6])
    assert torch.equal(kv.values[0, :, 20:23].transpose(0, 1).double(), parts[:, 6:])


def test_qk_norm_acts_per_head_before_the_rotation(backend: Backend) -> None:
    y, gamma_q, gamma_k = randn(2, 64, seed=8), randn(8, seed=1), randn(8, seed=2)
    kv = backend.kv_layer(1, 8, HEADS, "f32")
    out = y.clone()
    norms = Norm(gamma_q, 1e-6), Norm(gamma_k, 1e-6)
    backend.rope_append(one_span(backend, 2), out, HEADS, None, *norms, kv)
    parts, got = y.view(2, 8, 8), out.view(2, 8, 8).double()
    torch.testing.assert_close(got[:, :4], normed(parts[:, :4], gamma_q), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[:, 4:6], normed(parts[:, 4:6], gamma_k), rtol=1e-5, atol=1e-6)
    assert torch.equal(out.view(2, 8, 8)[:, 6:], parts[:, 6:])


def test_a_whole_qk_norm_acts_over_all_heads_of_a_token(backend: Backend) -> None:
    y, gamma_q, gamma_k = randn(2, 64, seed=8), randn(32, seed=1), randn(16, seed=2)
    kv = backend.kv_layer(1, 8, HEADS, "f32")
    out = y.clone()
    norms = Norm(gamma_q, 1e-6, whole=True), Norm(gamma_k, 1e-6, whole=True)
    backend.rope_append(one_span(backend, 2), out, HEADS, None, *norms, kv)
    got = out.double()
    torch.testing.assert_close(got[:, :32], normed(y[:, :32], gamma_q), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[:, 32:48], normed(y[:, 32:48], gamma_k), rtol=1e-5, atol=1e-6)
    assert torch.equal(out[:, 48:], y[:, 48:])
    assert torch.equal(kv.keys[0, :, :2].transpose(0, 1).flatten(1), out[:, 32:48])


def test_kv_copy_copies_a_prefix(backend: Backend) -> None:
    kv = backend.kv_layer(2, 4, HEADS, "f32")
    kv.keys.zero_()
    kv.values.zero_()
    kv.keys[0] = 1.0
    kv.values[0] = 2.0
    backend.kv_copy(kv, 0, 1, 3)
    assert kv.keys[1, :, :3].eq(1).all()
    assert kv.values[1, :, :3].eq(2).all()
    assert kv.keys[1, :, 3].eq(0).all()


def test_ceilings_are_measured(backend: Backend) -> None:
    assert 1e8 < backend.measure_bandwidth() < 1e13
    assert 1e8 < backend.measure_flops() < 1e16


def test_attend_in_blocks_of_queries_changes_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = randn(11, 64, seed=3)
    kv = backend.kv_layer(1, 16, HEADS, "f32")
    step = one_span(backend, 11)
    attention = Attention(HEADS, 0.3, window=4)
    backend.rope_append(step, y, HEADS, None, None, None, kv)
    whole, blocks = torch.empty(11, 32), torch.empty(11, 32)
    backend.attend(step, y, attention, kv, whole)
    monkeypatch.setattr(attention_ops, "SCORES", 4 * 11 * 3)
    backend.attend(step, y, attention, kv, blocks)
    torch.testing.assert_close(blocks, whole)


def test_out_of_memory_is_said_in_our_words(backend: Backend) -> None:
    with pytest.raises(DoesNotFitError, match="KV cache of 70,368,744,177,664 tokens"):
        backend.kv_layer(1, 1 << 46, HEADS, "f32")
    with pytest.raises(DoesNotFitError, match="activations"):
        backend.empty((1 << 50, 4))
