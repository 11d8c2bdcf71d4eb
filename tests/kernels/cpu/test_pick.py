"""Native ``pick`` against the reference: the same choice for the same logits and seed."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from llmrun.errors import InternalError
from llmrun.kernels.cpu.arrays import CpuArray
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.ops import Pick, PickRequest, Sampling
from llmrun.kernels.reference import sampling as reference

Fill = Callable[[CpuArray, torch.Tensor], CpuArray]
Choose = Callable[[torch.Tensor, PickRequest], Pick]


@pytest.fixture
def choose(cpu: CpuBackend, fill: Fill) -> Choose:
    """Picks from one row of logits."""

    def run(logits: torch.Tensor, request: PickRequest) -> Pick:
        array = fill(cpu.empty((1, len(logits))), logits)
        return cpu.pick(array, [request])[0]

    return run


def random_logits(generator: random.Random, vocab: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(generator.getrandbits(32))
    logits = torch.randn(vocab, generator=seed) * generator.choice(
        [0.0, 0.1, 1.0, 4.0, 10.0, 100.0]
    )
    return logits.round() if generator.random() < 0.3 else logits  # rounded: many ties


def random_request(generator: random.Random, vocab: int) -> PickRequest:
    def some_ids(*counts: int) -> list[int]:
        return [generator.randrange(vocab) for _ in range(generator.choice(counts))]

    sampling = Sampling(
        temperature=generator.choice([0.0, 1.0, 0.7, 0.1, 1.5, 5.0, 1e-9]),
        top_k=generator.choice([0, 0, 1, 2, 40, 500, 10**6]),
        top_p=generator.choice([1.0, 1.0, 0.9, 0.5, 0.1, 0.9999, 0.0]),
        min_p=generator.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        repeat_penalty=generator.choice([1.0, 1.1, 1.5, 0.8]),
        seed=generator.getrandbits(64),
        top_logprobs=generator.choice([0, 0, 1, 5]),
    )
    amounts = [1.0, -1.0, 100.0, -100.0, 0.1, generator.gauss(0, 3)]
    return PickRequest(
        sampling,
        draw=generator.getrandbits(generator.choice([3, 32, 64])),
        vocab=vocab,
        history=some_ids(0, 1, 10, 200),
        allowed=None if generator.random() < 0.7 else some_ids(1, 2, 10, 500),
        bias=[(token_id, generator.choice(amounts)) for token_id in some_ids(0, 0, 1, 5, 50)],
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_reference_choice(choose: Choose, seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(60):
        vocab = generator.choice([1, 2, 3, 17, 50, 257, 1000, 5000])
        logits = random_logits(generator, vocab)
        request = random_request(generator, vocab)
        got, want = choose(logits, request), reference.pick(logits, request)
        assert got.token_id == want.token_id, request
        assert got.logprob == pytest.approx(want.logprob, rel=1e-6, abs=2e-7)
        assert [p for _, p in got.top] == pytest.approx(
            [p for _, p in want.top], rel=1e-6, abs=2e-7
        )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=40, top_p=0.95),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=3.0, top_p=0.999),  # a nucleus of most ids
        Sampling(temperature=1.0, top_k=20_000, min_p=0.01),
    ],
    ids=["greedy", "plain", "top_k_p", "top_p", "flat", "large_k"],
)
def test_a_large_vocabulary(isas: list[str], fill: Fill, sampling: Sampling) -> None:
    if not isas:
        pytest.skip("there is no native library")
    backend = CpuBackend(1, huge_pages=False)
    logits = torch.randn(150_000, generator=torch.Generator().manual_seed(8)) * 3
    array = fill(backend.empty((1, len(logits))), logits)
    for draw in range(2):
        request = PickRequest(sampling, draw, 149_990)
        got = backend.pick(array, [request])[0]
        assert got.token_id == reference.pick(logits, request).token_id


def test_alternatives_are_sorted_and_ties_go_to_the_lowest_id(choose: Choose) -> None:
    logits = torch.tensor([0.0, 3.0, 5.0, 3.0, 5.0, -1.0])
    pick = choose(logits, PickRequest(Sampling(top_logprobs=9), 0, 6))
    assert pick.token_id == 2
    assert [token_id for token_id, _ in pick.top] == [2, 4, 1, 3, 0, 5]


def test_uniform_logits_fill_the_nucleus_in_order_of_ids(choose: Choose) -> None:
    request = [PickRequest(Sampling(temperature=1.0, top_p=0.5), n, 4) for n in range(100)]
    assert {choose(torch.zeros(4), one).token_id for one in request} == {0, 1}


def test_ids_outside_the_vocabulary_change_nothing(choose: Choose) -> None:
    logits = torch.tensor([1.0, 2.0, 0.5, 9.0])
    request = PickRequest(Sampling(repeat_penalty=2.0), 0, 3, history=[3, 1, 70_000])
    assert choose(logits, request).token_id == 0


@pytest.mark.parametrize("at", [0, 15, 16, 40, 41])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_r108_logits_that_are_not_finite_are_an_error(choose: Choose, bad: float, at: int) -> None:
    logits = torch.zeros(45)
    logits[at] = bad
    with pytest.raises(InternalError, match="not finite"):
        choose(logits, PickRequest(Sampling(temperature=1.0), 0, 42))


def test_r102_padding_may_hold_anything(choose: Choose) -> None:
    logits = torch.tensor([0.0, 1.0, math.nan, math.inf])
    assert choose(logits, PickRequest(Sampling(), 0, 2)).token_id == 1


def test_a_mask_that_leaves_nothing_says_so(choose: Choose) -> None:
    request = PickRequest(Sampling(temperature=1.0), 0, 4, allowed=[])
    with pytest.raises(InternalError, match="no token"):
        choose(torch.zeros(4), request)
