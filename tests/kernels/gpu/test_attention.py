"""Rotation, cache and attention in the interpreter, against the reference backend's.

Caches of f16 and f32 hold what the reference's hold; what int8 holds is checked against its own
formula in float64, and attention over it against the reference's over the same codes.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from llmrun.kernels.gpu import attention as ops
from llmrun.kernels.gpu.arrays import SMALL, GpuKvLayer, GpuStep, Prepared, Workspace
from llmrun.kernels.gpu.attention_shapes import splits_of
from llmrun.kernels.ops import Attention, Heads, Norm, Rope, Span
from llmrun.kernels.reference import attention as reference
from llmrun.kernels.reference.step import TorchKvLayer, TorchStep, kv_layer

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
NAN = float("nan")
LIMITS = {torch.int8: (0, 1), torch.float16: (1e-3, 1e-6), torch.float32: (1e-5, 1e-5)}
TOLERANCE = {"f16": 2e-3, "f32": 1e-5, "int8": 3e-3}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """A step with queries, keys and values, and both caches, poisoned where nothing was written."""

    heads: Heads
    spans: list[Span]
    kv: GpuKvLayer
    wanted_kv: TorchKvLayer
    y: torch.Tensor
    wanted_y: torch.Tensor
    step: GpuStep
    wanted_step: TorchStep

    @property
    def n(self) -> int:
        return self.step.n_tokens


def case(heads: Heads, spans: list[Span], form: str, capacity: int = 300, seed: int = 0) -> Case:
    slots = 1 + max(span.slot for span in spans)
    n = sum(span.count for span in spans)
    kv, wanted_kv = (make(slots, capacity, heads, form, CPU) for make in (ops.kv_layer, kv_layer))
    assert isinstance(kv, GpuKvLayer)
    assert isinstance(wanted_kv, TorchKvLayer)
    for part in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
        if part is not None:
            part.fill_(NAN if part.is_floating_point() else 77)
    for span in spans:  # what earlier calls left in the slots
        past = slice(0, span.position)
        keys, values = (
            randn(span.position, heads.n_kv_heads, heads.head_dim, seed=seed + 10 + span.slot + i)
            for i in (0, 100)
        )
        wanted_kv.write(span.slot, past, keys, values)
        for mine, theirs in pairs(kv, wanted_kv):
            mine[span.slot, :, past] = theirs[span.slot, :, past]
    y = randn(n, (heads.n_heads + 2 * heads.n_kv_heads) * heads.head_dim, seed=seed)
    y = torch.cat((y, torch.full((max(0, SMALL - n), y.shape[1]), NAN)))
    step, wanted_step = GpuStep(n, CPU), TorchStep(n, CPU)
    for each in (step, wanted_step):
        each.set([0] * n, spans, [])
    return Case(heads, spans, kv, wanted_kv, y, y.clone(), step, wanted_step)


def pairs(kv: GpuKvLayer, wanted: TorchKvLayer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = [(kv.keys, wanted.keys), (kv.values, wanted.values)]
    if kv.key_scales is not None and kv.value_scales is not None:
        assert wanted.key_scales is not None
        assert wanted.value_scales is not None
        found += [(kv.key_scales, wanted.key_scales), (kv.value_scales, wanted.value_scales)]
    return found


def append(
    it: Case,
    rope: Rope | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    rows: int | None = None,
) -> None:
    ops.rope_append(
        it.y, it.heads, rope, q_norm, k_norm, it.step.positions, it.step.slots, rows or it.n, it.kv
    )
    reference.rope_append(it.wanted_step, it.wanted_y, it.heads, rope, q_norm, k_norm, it.wanted_kv)


def assert_appended(it: Case) -> None:
    """y and the cache are the reference's; nothing else was written."""
    torch.testing.assert_close(it.y[: it.n], it.wanted_y[: it.n], rtol=1e-5, atol=1e-5)
    assert it.y[it.n :].isnan().all()
    untouched = torch.ones(it.kv.keys.shape[0], it.kv.keys.shape[2], dtype=torch.bool)
    for span in it.spans:
        untouched[span.slot, : span.position + span.count] = False
        here = slice(0, span.position + span.count)
        for mine, theirs in pairs(it.kv, it.wanted_kv):
            got, want = mine[span.slot, :, here].float(), theirs[span.slot, :, here].float()
            rtol, atol = LIMITS[mine.dtype]
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    for part, _ in pairs(it.kv, it.wanted_kv):
        rest = part.transpose(1, 2)[untouched]
        assert rest.isnan().all() if part.is_floating_point() else (rest == 77).all()


def rope_of(half: int, factor: float = 1.0) -> Rope:
    return Rope(tuple(10000.0 ** (-i / max(half, 1)) for i in range(half)), factor)


# --- rope_append ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "form"),
    [(16, "f16"), (40, "int8"), (128, "int8"), (192, "int8"), (192, "f32"), (80, "f16")],
)
def test_rope_append_rotates_whole_heads(head_dim: int, form: str) -> None:
    it = case(Heads(4, 2, head_dim), [Span(1, 0, 2, 7), Span(0, 2, 1, 0)], form)
    append(it, rope_of(head_dim // 2))
    assert_appended(it)


@pytest.mark.parametrize("half", [0, 8, 10])
def test_rope_append_leaves_the_rest_of_a_head(half: int) -> None:
    it = case(Heads(2, 1, 48), [Span(0, 0, 3, 100)], "f16")
    append(it, rope_of(half, 1.25) if half else None)
    assert_appended(it)


@pytest.mark.slow
@pytest.mark.parametrize(("q_whole", "k_whole"), [(False, False), (True, True), (True, False)])
def test_rope_append_norms_first(q_whole: bool, k_whole: bool) -> None:
    heads = Heads(6, 3, 48)
    q_norm = Norm(randn((6 if q_whole else 1) * 48, seed=1), 1e-6, 1.0, whole=q_whole)
    k_norm = Norm(randn((3 if k_whole else 1) * 48, seed=2), 1e-2, whole=k_whole)
    it = case(heads, [Span(0, 0, 2, 5)], "f32")
    append(it, rope_of(16), q_norm, k_norm)
    assert_appended(it)


def test_rope_append_norms_keys_alone() -> None:
    it = case(Heads(2, 2, 32), [Span(0, 0, 2, 5)], "f32")
    append(it, rope_of(16), None, Norm(randn(32, seed=2), 1e-6))
    assert_appended(it)


def test_rope_append_skips_rows_without_a_slot_or_room() -> None:
    it = case(Heads(2, 1, 16), [Span(0, 0, 2, 3)], "f16", capacity=5)
    append(it, rope_of(8), rows=4)  # rows 2 and 3: slot -1
    assert_appended(it)
    it.step.positions[:2] = 5  # as a step issued before the last was seen may have it
    before = it.kv.keys.clone()
    ops.rope_append(it.y, it.heads, None, None, None, it.step.positions, it.step.slots, 2, it.kv)
    torch.testing.assert_close(it.kv.keys, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("position", [4097, 131071, 1048575])
def test_angles_are_precise_far_out(position: int) -> None:
    """Position times frequency is rounded to fp32, as in the reference; nothing after it is."""
    half, heads = 16, Heads(1, 1, 32)
    y = torch.zeros(1, 3 * heads.head_dim)
    y[0, :half] = 1  # turns into cosines and sines
    kv = ops.kv_layer(1, position + 1, heads, "f16", CPU)
    step = GpuStep(1, CPU)
    step.set([0], [Span(0, 0, 1, position)], [])
    rope = rope_of(half)
    ops.rope_append(y, heads, rope, None, None, step.positions, step.slots, 1, kv)
    angles = (torch.tensor(rope.inv_freq) * float(position)).double()
    want = torch.cat((angles.cos(), angles.sin()))
    torch.testing.assert_close(y[0, : 2 * half].double(), want, rtol=0, atol=2e-7)


# --- int8 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "group"), [(128, 64), (192, 64), (64, 64), (80, 80)])
def test_int8_codes_and_scales_are_the_formula(head_dim: int, group: int) -> None:
    it = case(Heads(1, 2, head_dim), [Span(0, 0, 3, 0)], "int8")
    sizes = torch.tensor([1.0, 1e-3, 0.0])[:, None]
    it.y[:3] *= sizes
    values = it.y[:3, 3 * head_dim :].double().view(3, 2, -1, group)
    append(it)
    scales = (values.abs().amax(-1) / 127).float().half().double()
    codes = torch.where(scales[..., None] > 0, values / scales[..., None], 0).round()
    assert it.kv.value_scales is not None
    assert torch.equal(it.kv.value_scales[0, :, :3].double(), scales.transpose(0, 1))
    got = it.kv.values[0, :, :3].transpose(0, 1).double()
    assert torch.equal(got, codes.clamp(-127, 127).flatten(2))


def test_kv_copy_takes_scales_along() -> None:
    it = case(Heads(1, 2, 64), [Span(0, 0, 3, 4), Span(1, 3, 1, 0)], "int8")
    append(it)
    ops.kv_copy(it.kv, 0, 1, 5)
    for part, _ in pairs(it.kv, it.wanted_kv):
        assert torch.equal(part[1, :, :5], part[0, :, :5])
        assert not torch.equal(part[1, :, 5:7], part[0, :, 5:7])


# --- attention --------------------------------------------------------------------------------


def attention_of(
    heads: Heads, window: int | None = None, softcap: float | None = None, sinks: bool = False
) -> Attention:
    extra = randn(heads.n_heads, seed=5) * 3 if sinks else None
    return Attention(heads, 1.3 * heads.head_dim**-0.5, window, softcap, extra)


def wanted(it: Case, attention: Attention) -> torch.Tensor:
    o = torch.full((it.n, it.heads.n_heads * it.heads.head_dim), NAN)
    reference.attend(it.wanted_step, it.wanted_y, attention, it.wanted_kv, o)
    return o


def share_cache(it: Case) -> None:
    """Append, then make both caches bit for bit equal, so that attention alone is compared."""
    append(it)
    for mine, theirs in pairs(it.kv, it.wanted_kv):
        for span in it.spans:
            here = slice(0, span.position + span.count)
            theirs[span.slot, :, here] = mine[span.slot, :, here]


def few(
    it: Case, attention: Attention, m: int, work: Workspace | None = None
) -> tuple[torch.Tensor, Prepared, Workspace]:
    width = it.heads.n_heads * it.heads.head_dim
    o, onto = torch.full((SMALL, width), NAN), Prepared.empty(width, CPU)
    onto.u[:, :width] = NAN
    work = work or Workspace.empty(CPU)
    work.partials.fill_(NAN)
    step = it.step
    ops.attend_few(it.y, attention, step.positions, step.slots, m, it.kv, o, onto, work)
    return o, onto, work


SPANS = [Span(0, 0, 2, 0), Span(2, 2, 1, 290), Span(1, 3, 1, 63)]
SHAPES = [
    (Heads(4, 2, 64), {}),
    (Heads(3, 1, 80), {"window": 100}),
    (Heads(6, 2, 24), {"sinks": True}),
    (Heads(2, 2, 16), {"softcap": 2.0}),
    (Heads(2, 1, 256), {"softcap": 5.0, "window": 7}),
    (Heads(20, 1, 32), {"sinks": True, "window": 64}),
]


CASES = [
    (heads, options, form)
    for number, (heads, options) in enumerate(SHAPES)
    for form in ("f16", ("int8", "f32")[number % 2])
]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "options", "form"), CASES)
def test_attend_few(heads: Heads, options: dict[str, Any], form: str) -> None:
    it = case(heads, SPANS, form)
    share_cache(it)
    attention = attention_of(heads, **options)
    want = wanted(it, attention)
    o, onto, work = few(it, attention, 6)
    width = want.shape[1]
    torch.testing.assert_close(o[: it.n], want, rtol=TOLERANCE[form], atol=TOLERANCE[form])
    assert o[it.n :].isnan().all()
    assert torch.equal(onto.u[: it.n, :width], o[: it.n].bfloat16())
    assert (onto.u[:, width:] == 0).all()
    assert onto.u[it.n :, :width].isnan().all()
    assert (work.counters == 0).all()


def test_the_capacity_of_the_cache_says_how_many_parts_there_may_be() -> None:
    attention, work = attention_of(Heads(2, 1, 16)), Workspace.empty(CPU)
    assert splits_of(1024, attention, work) == 8
    assert splits_of(1 << 16, attention, work) == 16
    assert splits_of(64, attention, work) == 1
    assert splits_of(1 << 16, attention_of(attention.heads, window=300), work) == 2
    small = Workspace.empty(CPU, floats=SMALL * 2 * 18 * 5)
    assert splits_of(1 << 16, attention, small) == 4


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 700])
def test_attend_few_cuts_each_row_by_its_own_length(window: int | None) -> None:
    """One part, full parts, a part of one token, all the parts there are, and larger ones."""
    lengths = [1, 127, 128, 129, 257, 1024, 1025, 1500]
    spans = [Span(i, i, 1, length - 1) for i, length in enumerate(lengths)]
    it = case(Heads(2, 1, 16), spans, "f32", capacity=1600)
    share_cache(it)
    attention = attention_of(it.heads, window)
    o, _, work = few(it, attention, 8)
    torch.testing.assert_close(o[:8], wanted(it, attention), rtol=1e-5, atol=1e-5)
    assert (work.counters == 0).all()
    small = Workspace.empty(CPU, floats=SMALL * 2 * 18 * 2)
    o, _, _ = few(it, attention, 8, small)
    torch.testing.assert_close(o[:8], wanted(it, attention), rtol=1e-5, atol=1e-5)


def test_programs_of_parts_without_tokens_write_nothing() -> None:
    it = case(Heads(2, 1, 16), [Span(0, 0, 1, 299)], "f32", capacity=1600)
    share_cache(it)
    _, _, work = few(it, attention_of(it.heads), 1)
    records = 8 * 2  # of the parts there may be, of two heads each
    values, rest = work.partials[: records * 16].view(8, -1), work.partials[records * 16 :]
    assert values[:3].isfinite().all()
    assert values[3:].isnan().all()
    assert rest.isfinite().sum() == 2 * 3 * 2
    alone = case(Heads(2, 1, 16), [Span(0, 0, 1, 100)], "f32", capacity=1600)
    share_cache(alone)
    _, _, work = few(alone, attention_of(it.heads), 1)
    assert work.partials.isnan().all()  # nobody else's part to be added


@pytest.mark.slow
@pytest.mark.parametrize("form", ["f16", "int8"])
def test_attend_few_gives_a_row_the_same_bits_among_others(form: str) -> None:
    """Whatever the lengths of the others, and wherever in the step it stands."""
    heads, lengths = Heads(4, 2, 32), [5, 1500, 300, 64]
    spans = [Span(i, i, 1, length - 1) for i, length in enumerate(lengths)]
    it = case(heads, spans, form, capacity=1600)
    share_cache(it)
    attention = attention_of(heads)
    together, _, _ = few(it, attention, 4)
    queries, step = it.y, it.step
    for row, span in enumerate(spans):
        it.y = queries[row:].clone()
        it.step = GpuStep(1, CPU)
        it.step.set([0], [Span(span.slot, 0, 1, span.position)], [])
        alone, _, _ = few(it, attention, 1)
        assert torch.equal(alone[0], together[row]), row
        assert alone[1:].isnan().all()
    it.y, it.step = queries, step
    eight, _, _ = few(it, attention, 8)  # rows 4 to 7 are not in use
    assert torch.equal(eight[:4], together[:4])


@pytest.mark.parametrize("window", [None, 1])
def test_attend_few_survives_a_position_behind_the_cache(window: int | None) -> None:
    it = case(Heads(2, 1, 16), [Span(0, 0, 1, 4)], "f16", capacity=5)
    share_cache(it)
    it.step.positions[0] = 5
    o, _, _ = few(it, attention_of(it.heads, window), 1)
    assert o[0].isfinite().all()


MANY = [Span(1, 0, 66, 0), Span(0, 66, 3, 40), Span(2, 69, 1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "options", "form"), CASES[:10])
def test_attend_many(heads: Heads, options: dict[str, Any], form: str) -> None:
    """A prompt from the start, one behind a cached prefix, and a single token."""
    it = case(heads, MANY, form)
    share_cache(it)
    attention = attention_of(heads, **options)
    o = torch.full((it.n + 3, heads.n_heads * heads.head_dim), NAN)
    ops.attend_many(it.y, attention, it.spans, it.kv, o)
    want = wanted(it, attention)
    torch.testing.assert_close(o[: it.n], want, rtol=TOLERANCE[form], atol=TOLERANCE[form])
    assert o[it.n :].isnan().all()
