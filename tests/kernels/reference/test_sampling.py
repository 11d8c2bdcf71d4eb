"""``pick``: filters against transformers' own processors, draws against expected frequencies."""

import math
from collections import Counter

import pytest
import torch

from llmrun.errors import InternalError
from llmrun.kernels.ops import Backend, PickRequest, Sampling
from llmrun.kernels.reference.sampling import uniform


def request(sampling: Sampling, **more: object) -> PickRequest:
    return PickRequest(sampling, draw=0, vocab=more.pop("vocab", 50), **more)


def choose(backend: Backend, logits: torch.Tensor, sampling: Sampling, **more: object) -> int:
    return backend.pick(logits.view(1, -1), [request(sampling, **more)])[0].token_id


def frequencies(backend: Backend, logits: torch.Tensor, sampling: Sampling, n: int) -> Counter[int]:
    requests = [PickRequest(sampling, draw, len(logits)) for draw in range(n)]
    return Counter(p.token_id for p in backend.pick(logits.expand(n, -1), requests))


LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(4)) * 2


def test_philox_known_answers() -> None:
    # Known-answer vectors of Random123, philox4x32-10, first word.
    ids = torch.tensor([0])
    assert int(uniform(0, 0, ids)[0] * 2**32) == 0x6627E8D5
    ones = torch.tensor([0xFFFFFFFF])
    # counter = (ffffffff, ffffffff, ffffffff, 0), key = ffffffffffffffff: worked out with integers.
    assert int(uniform(2**64 - 1, 2**64 - 1, ones)[0] * 2**32) == philox_word(
        [0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0], [0xFFFFFFFF, 0xFFFFFFFF]
    )


def philox_word(counter: list[int], key: list[int]) -> int:
    """Philox 4x32-10 in exact integers."""
    mask = 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & mask, (a >> 32) ^ counter[3] ^ key[1],
                   a & mask]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter[0]


def test_greedy_takes_the_lowest_of_equal_ids(backend: Backend) -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert choose(backend, logits, Sampling(), vocab=4) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.6),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05),
    ],
    ids=["plain", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_filtered_distribution(backend: Backend, sampling: Sampling) -> None:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores = LOGITS.view(1, -1).double()
    scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    expected = torch.softmax(scores, dim=-1)[0]
    n = 4000
    counted = frequencies(backend, LOGITS, sampling, n)
    assert set(counted) <= set(torch.nonzero(expected).flatten().tolist())
    # Chi-square over ids with an expected count of 5 or more, the rest pooled.
    big = [i for i in range(50) if expected[i] * n >= 5]
    chi = sum((counted[i] - expected[i] * n) ** 2 / (expected[i] * n) for i in big)
    assert float(chi) < len(big) + 5 * math.sqrt(2 * len(big)) + 5


def test_same_seed_same_choices_other_seed_other_choices(backend: Backend) -> None:
    def choices(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.2, seed=seed)
        requests = [PickRequest(sampling, draw, 50) for draw in range(64)]
        return [p.token_id for p in backend.pick(LOGITS.expand(64, -1), requests)]

    assert choices(7) == choices(7)
    assert sum(choices(seed) != choices(seed + 1) for seed in range(20)) >= 19


def test_r102_padding_ids_are_never_chosen(backend: Backend) -> None:
    logits = LOGITS.clone()
    logits[45:] = 100.0
    assert choose(backend, logits, Sampling(), vocab=45) < 45
    hot = Sampling(temperature=5.0)
    requests = [PickRequest(hot, draw, 45) for draw in range(300)]
    assert max(p.token_id for p in backend.pick(logits.expand(300, -1), requests)) < 45


def test_r114_r115_repeat_penalty_equals_the_published_rule(backend: Backend) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    history = [3, 3, 8, 20]
    want = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([history]), LOGITS.view(1, -1).clone()
    )
    sampling = Sampling(repeat_penalty=1.3)
    assert choose(backend, LOGITS, sampling, history=history) == int(want.argmax())
    only = torch.tensor([-2.0, -2.9])
    # A seen id with a negative logit must not become likelier: -2 * 1.5 < -2.9.
    assert choose(backend, only, Sampling(repeat_penalty=1.5), history=[0], vocab=2) == 1


def test_mask_and_bias(backend: Backend) -> None:
    assert choose(backend, LOGITS, Sampling(), allowed=[17]) == 17
    assert choose(backend, LOGITS, Sampling(), bias=[(9, 1000.0)]) == 9
    hot = Sampling(temperature=2.0, top_k=3)
    assert choose(backend, LOGITS, hot, allowed=[4, 6], bias=[(6, -1e9)]) == 4


def test_logprobs_are_those_of_the_plain_softmax(backend: Backend) -> None:
    sampling = Sampling(temperature=0.5, top_k=2, top_logprobs=3)
    pick = backend.pick(LOGITS.view(1, -1), [request(sampling)])[0]
    want = torch.log_softmax(LOGITS.double(), dim=0)
    assert pick.logprob == pytest.approx(float(want[pick.token_id]), abs=1e-12)
    assert [i for i, _ in pick.top] == torch.argsort(want, descending=True)[:3].tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_r108_logits_that_are_not_finite_are_an_error(backend: Backend, bad: float) -> None:
    logits = LOGITS.clone()
    logits[5] = bad
    with pytest.raises(InternalError, match="not finite"):
        choose(backend, logits, Sampling())


def test_tiny_temperature_is_finite_and_greedy(backend: Backend) -> None:
    assert choose(backend, LOGITS, Sampling(temperature=1e-9)) == int(LOGITS.argmax())
