"""``pick`` on the device against the reference: the same choice for the same logits and seed."""

import math
import random
from dataclasses import replace

import pytest
import torch

from llmrun.errors import InternalError
from llmrun.kernels.gpu.linear import Best
from llmrun.kernels.gpu.pick import (
    Feed,
    Picker,
    PickState,
    best_launch,
    greedy,
    launches,
    pick,
    picks,
    served,
)
from llmrun.kernels.ops import Pick, PickRequest, Sampling
from llmrun.kernels.reference import sampling as reference

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")


def choose(logits: torch.Tensor, request: PickRequest) -> Pick:
    return pick(logits[None], [request], PickState.empty(1, len(logits), CPU))[0]


def random_logits(generator: random.Random, vocab: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(generator.getrandbits(32))
    logits = torch.randn(vocab, generator=seed) * generator.choice([0.1, 1.0, 4.0, 10.0, 100.0])
    return logits.round() if generator.random() < 0.3 else logits  # rounded: many ties


def random_request(generator: random.Random, vocab: int) -> PickRequest:
    sampling = Sampling(
        temperature=generator.choice([0.0, 1.0, 0.7, 0.1, 1.5, 5.0, 1e-9]),
        top_k=generator.choice([0, 0, 1, 2, 40, 500, 10**6]),
        # No sum of equal probabilities comes near these: its rounding would decide.
        top_p=generator.choice([1.0, 1.0, 0.903, 0.5017, 0.1009, 0.99993, 0.0]),
        min_p=generator.choice([0.0, 0.0, 0.0507, 0.503, 1.0]),
        repeat_penalty=generator.choice([1.0, 1.1, 1.5, 0.8]),
        seed=generator.getrandbits(64),
    )
    history = [generator.randrange(vocab) for _ in range(generator.choice([0, 1, 10, 200]))]
    draw = generator.getrandbits(generator.choice([3, 32, 64]))
    return PickRequest(sampling, draw, vocab, history)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_reference_choice(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(25):
        size = generator.choice([1, 2, 3, 17, 50, 257, 1000, 5000])
        logits = random_logits(generator, size)
        request = random_request(generator, generator.choice([size, max(1, size - 3)]))
        got, want = choose(logits, request), reference.pick(logits, request)
        assert got.token_id == want.token_id, request
        assert got.logprob == pytest.approx(want.logprob, rel=1e-6, abs=3e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=40, top_p=0.95),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=3.0, top_p=0.999),  # a nucleus of most ids
        Sampling(temperature=1.0, top_k=9_000, min_p=0.01),
    ],
    ids=["greedy", "plain", "top_k_p", "top_p", "flat", "large_k"],
)
def test_a_large_vocabulary(sampling: Sampling) -> None:
    logits = torch.randn(30_000, generator=torch.Generator().manual_seed(8)) * 3
    request = PickRequest(sampling, 1, 29_990)
    assert choose(logits, request).token_id == reference.pick(logits, request).token_id


def test_rows_are_chosen_apart_and_those_not_in_use_are_left_alone() -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1)) * 4
    samplings = [
        Sampling(),
        Sampling(temperature=1.0, seed=2**64 - 1),
        Sampling(temperature=0.8, top_k=7, repeat_penalty=1.3),
    ]
    requests = [PickRequest(s, 5 + i, 2990, [i, 3]) for i, s in enumerate(samplings)]
    logits[3] = math.nan
    state = PickState.empty(4, 3000, CPU)
    state.result.fill_(7.0)
    got = pick(logits, requests, state)
    want = [reference.pick(row, one) for row, one in zip(logits, requests, strict=False)]
    assert [one.token_id for one in got] == [one.token_id for one in want]
    assert state.result[3].tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repeat_penalty=1.4),
        Sampling(temperature=0.9, top_k=30, top_p=0.91, repeat_penalty=1.2, seed=11),
        Sampling(temperature=1.1, seed=3),
    ],
    ids=["greedy", "filters", "plain"],
)
def test_a_row_that_is_fed_makes_the_choices_of_a_host_loop(sampling: Sampling) -> None:
    rows = torch.randn(6, 1, 2000, generator=torch.Generator().manual_seed(5)) * 2
    state = PickState.empty(2, 2000, CPU)
    logits = torch.zeros(2, 2000)
    feed = Feed(torch.tensor([9, 9], dtype=torch.int32), torch.tensor([4, 6], dtype=torch.int32))
    said = [1999, 4]
    state.set([PickRequest(sampling, 2, 1990, said)])
    for number, row in enumerate(rows):
        logits[:1] = row
        want = reference.pick(row[0], PickRequest(sampling, 2 + number, 1990, said))
        for launch in launches(logits, state, feed):
            launch()
        assert picks(state.result[:1])[0].token_id == want.token_id
        assert feed.ids.tolist() == [want.token_id, 9]
        assert feed.positions.tolist() == [5 + number, 6]
        said.append(want.token_id)


def best_of(logits: torch.Tensor, vocab: int) -> Best:
    """What a head finds of its logits, in plain torch."""
    best = replace(Best.empty(*logits.shape, CPU), vocab=vocab)
    for row, tile in ((r, t) for r in range(len(logits)) for t in range(best.values.shape[1])):
        part = logits[row, 64 * tile : min(64 * tile + 64, vocab)]
        if len(part) == 0:
            best.values[row, tile], best.ids[row, tile] = math.nan, 2**31 - 1  # may be anything
            continue
        largest = part.nan_to_num(-math.inf, -math.inf).max()
        best.values[row, tile] = largest if part.isfinite().all() else math.nan
        best.sums[row, tile] = (part - largest).exp().sum()
        best.ids[row, tile] = 64 * tile + int(part.nan_to_num(-math.inf, -math.inf).argmax())
    return best


@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_a_heads_tiles_is_the_reference_choice(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(15):
        size = generator.choice([1, 2, 63, 64, 65, 200, 1000, 5000])
        vocab = generator.choice([size, max(1, size - 3), max(1, size - 70)])
        logits = torch.stack([random_logits(generator, size) for _ in range(2)])
        state = PickState.empty(3, size, CPU)  # the third row is not in use
        feed = Feed(torch.full((3,), 9, dtype=torch.int32), torch.arange(3, dtype=torch.int32))
        requests = [PickRequest(Sampling(), 5, vocab)] * 2
        assert greedy(requests) == vocab
        state.set(requests)
        state.result[2] = 7.0
        best_launch(best_of(torch.cat((logits, logits[:1])), vocab), state, feed)()
        want = [reference.pick(row, requests[0]) for row in logits]
        got = picks(state.result[:2])
        assert [one.token_id for one in got] == [one.token_id for one in want]
        assert [one.logprob for one in got] == pytest.approx(
            [one.logprob for one in want], abs=1e-5
        )
        assert feed.ids.tolist() == [want[0].token_id, want[1].token_id, 9]
        assert feed.positions.tolist() == [1, 2, 2]
        assert state.numbers[:, 1].tolist() == [6, 6, 0]
        assert state.result[2].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_r108_a_tile_that_is_not_finite_is_an_error_but_an_id_is_fed(bad: float) -> None:
    request = PickRequest(Sampling(), 0, 150)
    for places in ([70], range(150)):
        logits = torch.zeros(1, 160)
        logits[0, list(places)] = bad
        state = PickState.empty(1, 160, CPU)
        feed = Feed(torch.tensor([9], dtype=torch.int32), torch.tensor([4], dtype=torch.int32))
        state.set([request])
        best_launch(best_of(logits, 150), state, feed)()
        with pytest.raises(InternalError, match="not finite"):
            picks(state.result)
        assert 0 <= int(feed.ids) < 150  # the next step is under way and embeds it


@pytest.mark.parametrize(
    "other",
    [
        PickRequest(Sampling(temperature=0.5), 0, 60),
        PickRequest(Sampling(repeat_penalty=1.1), 0, 60),
        PickRequest(Sampling(), 0, 59),
    ],
)
def test_rows_that_are_not_all_greedy_alike_are_scanned(other: PickRequest) -> None:
    plain = PickRequest(Sampling(), 0, 60)
    assert greedy([plain, plain]) == 60
    assert greedy([plain, other]) is None


def test_state_can_be_set_again() -> None:
    state = PickState.empty(1, 50, CPU)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    hard = Sampling(repeat_penalty=100.0)
    first = pick(logits, [PickRequest(Sampling(), 0, 50)], state)[0].token_id
    other = pick(logits, [PickRequest(hard, 0, 50, [first])], state)[0].token_id
    assert other != first
    assert pick(logits, [PickRequest(hard, 0, 50, [other])], state)[0].token_id == first


def test_a_picker_takes_any_number_of_rows_and_ids() -> None:
    picker = Picker()
    for rows, vocab in ((1, 50), (3, 50), (2, 50), (2, 1100)):
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))
        requests = [PickRequest(Sampling(), 0, vocab)] * rows
        got = [one.token_id for one in picker.pick(logits, requests)]
        assert got == logits.argmax(dim=1).tolist()


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(3000)
    logits[[2999, 1500, 1030]] = 3.0
    assert choose(logits, PickRequest(Sampling(), 0, 3000)).token_id == 1030


def test_top_k_takes_the_lowest_of_equal_ids() -> None:
    hot = Sampling(temperature=100.0, top_k=3)
    logits = torch.zeros(2500)
    logits[2000] = 1.0
    chosen = [choose(logits, PickRequest(hot, draw, 2500)).token_id for draw in range(9)]
    assert set(chosen) == {0, 1, 2000}


def test_uniform_logits_fill_the_nucleus_in_order_of_ids() -> None:
    half = Sampling(temperature=1.0, top_p=0.5)
    chosen = {choose(torch.zeros(4), PickRequest(half, n, 4)).token_id for n in range(9)}
    assert chosen == {0, 1}


def test_what_the_kernels_do_not_serve_is_chosen_by_the_reference() -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(3))
    requests = [
        PickRequest(Sampling(), 0, 60, bias=[(9, 1000.0)]),
        PickRequest(Sampling(temperature=1.0), 0, 60, allowed=[17]),
        PickRequest(Sampling(top_logprobs=3), 0, 60),
        PickRequest(Sampling(), 0, 60),
    ]
    assert [served(one) for one in requests] == [False, False, False, True]
    got = pick(logits.expand(4, -1).contiguous(), requests, PickState.empty(4, 60, CPU))
    assert [got[0].token_id, got[1].token_id, len(got[2].top)] == [9, 17, 3]
    assert got == [reference.pick(logits, one) for one in requests]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=5, top_p=0.9)])
@pytest.mark.parametrize("at", [0, 1500])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_r108_logits_that_are_not_finite_are_an_error(
    bad: float, at: int, sampling: Sampling
) -> None:
    logits = torch.zeros(1600)
    logits[at] = bad
    with pytest.raises(InternalError, match="not finite"):
        choose(logits, PickRequest(sampling, 0, 1550))
    all_bad = torch.full((1600,), bad)
    with pytest.raises(InternalError, match="not finite"):
        choose(all_bad, PickRequest(sampling, 0, 1550))


def test_r102_padding_may_hold_anything() -> None:
    logits = torch.tensor([0.0, 1.0, math.nan, math.inf])
    assert choose(logits, PickRequest(Sampling(), 0, 2)).token_id == 1
    padded = torch.full((3000,), math.nan)
    padded[:2] = torch.tensor([0.0, 1.0])
    got = choose(padded, PickRequest(Sampling(temperature=1e-9, top_p=0.9), 0, 2))
    assert got.token_id == 1
    assert math.isfinite(got.logprob)
