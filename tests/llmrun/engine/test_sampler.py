import math
from typing import Any

import pytest

from llmrun.engine.sampler import MAX_SEED, Sampler, SamplingOptions, resolve
from llmrun.errors import UsageError
from llmrun.kernels.ops import Sampling


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1e-9},
        {"temperature": 5.0},
        {"top_k": 0},
        {"top_k": 1},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"min_p": 0.0},
        {"min_p": 0.999},
        {"repeat_penalty": 0.5},
        {"repeat_penalty": 2.0},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"top_logprobs": 20},
    ],
)
def test_r113_values_in_range_pass_unchanged(options: dict[str, Any]) -> None:
    sampling = resolve(SamplingOptions(**options))
    assert all(getattr(sampling, name) == value for name, value in options.items())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("min_p", math.nan),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("repeat_penalty", math.nan),
        ("repeat_penalty", math.inf),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("top_logprobs", -1),
    ],
)
def test_r113_values_out_of_range_name_the_option(name: str, value: float) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(SamplingOptions(**{name: value}))  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    assert f"--{name.replace('_', '-')} {value}" in caught.value.what
    assert caught.value.next_step


def test_r120_seed_is_kept_and_none_draws_one() -> None:
    assert resolve(SamplingOptions(seed=42)).seed == 42
    drawn = {resolve(SamplingOptions()).seed for _ in range(8)}
    assert len(drawn) > 1


def test_r116_penalty_is_off_by_default_and_never_sees_the_prompt() -> None:
    assert resolve(SamplingOptions()).repeat_penalty == 1.0
    generated = [5, 6, 5]
    assert tuple(Sampler(Sampling(), 100).request(generated).history) == ()
    penalized = Sampler(Sampling(repeat_penalty=1.3), 100).request(generated)
    assert tuple(penalized.history) == (5, 6, 5)


def test_r118_draws_count_from_zero_in_every_request() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=7), 100)
    first = [sampler.request([1] * n).draw for n in range(3)]
    again = [sampler.request([1] * n).draw for n in range(3)]
    assert first == again == [0, 1, 2]


def test_r102_requests_cut_padding_rows_and_carry_the_bias() -> None:
    request = Sampler(Sampling(), vocab=90, bias=((3, -1.0),)).request([])
    assert request.vocab == 90
    assert request.bias == ((3, -1.0),)
