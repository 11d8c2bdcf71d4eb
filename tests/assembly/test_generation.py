"""What generation_config.json says: end ids and sampling, checked."""

import pytest

from llmrun.cli.generation import end_ids, sampling_defaults
from llmrun.errors import ModelFileError


def test_r046_r047_end_ids_are_the_union() -> None:
    assert end_ids(frozenset({2}), [7, 9], None) == {2, 7, 9}
    assert end_ids(frozenset(), 7, [True, -1, "x"]) == {7}


def test_sampling_follows_the_publisher() -> None:
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    options = sampling_defaults(asked | {"repetition_penalty": 1.05})
    assert (options.temperature, options.top_k, options.top_p) == (0.6, 20, 0.95)
    assert (options.min_p, options.repeat_penalty) == (0.1, 1.05)


def test_without_do_sample_it_is_greedy_and_keeps_the_penalty() -> None:
    options = sampling_defaults({"temperature": 0.6, "repetition_penalty": 1.1})
    assert (options.temperature, options.repeat_penalty) == (0.0, 1.1)


@pytest.mark.parametrize(
    "bad",
    [
        {"do_sample": True, "top_k": float("inf")},
        {"do_sample": True, "top_p": 3.0},
        {"do_sample": True, "temperature": "hot"},
        {"repetition_penalty": 0},
    ],
)
def test_values_that_make_no_sense_are_the_files_fault(bad: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=r"generation_config\.json"):
        sampling_defaults(bad)
