"""Thread options against what this process may use."""

import pytest

from llmrun.cli.threads import ThreadChoice, choose_threads, usable_processors
from llmrun.kernels.cpu.topology import Threads


def machine() -> Threads:
    return Threads(4, "4 physical cores", 8, "8 processors")


@pytest.mark.parametrize("open_", [None, 0, -1])
def test_left_open(open_: int | None) -> None:
    choice = choose_threads(open_, open_, open_, machine)
    assert choice == ThreadChoice(4, None, "4 physical cores")
    assert choice.count == 4


def test_one_number_stands_for_both() -> None:
    assert choose_threads(6, machine=machine) == ThreadChoice(6, 6, "as asked")


def test_the_narrower_option_wins() -> None:
    choice = choose_threads(6, decode=2, machine=machine)
    assert (choice.prefill, choice.decode, choice.count) == (6, 2, 6)
    choice = choose_threads(prefill=2, decode=6, machine=machine)
    assert (choice.prefill, choice.decode, choice.count) == (2, 6, 6)


def test_decode_alone_leaves_the_prompt_open() -> None:
    assert choose_threads(decode=1, machine=machine) == ThreadChoice(4, 1, "4 physical cores")


def test_more_than_can_run_is_cut_and_said() -> None:
    choice = choose_threads(64, decode=9, machine=machine)
    assert (choice.prefill, choice.decode) == (8, 8)
    assert choice.notes == (
        "--threads 64 is cut to 8: more would only wait for others (8 processors)",
        "--threads-decode 9 is cut to 8: more would only wait for others (8 processors)",
    )


def test_a_quota_is_named() -> None:
    choice = choose_threads(
        prefill=2, machine=lambda: Threads(1, "cut to 1 by a quota", 1, "a quota")
    )
    assert choice.prefill == 1
    assert choice.notes[0].endswith("(a quota)")


def test_this_machine() -> None:
    assert 1 <= choose_threads().prefill <= usable_processors()
