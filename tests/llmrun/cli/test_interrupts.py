"""Ctrl-C while an answer comes."""

import signal
import time

import pytest

from llmrun.cli import interrupts
from llmrun.cli.interrupts import stops_the_answer


def test_the_first_press_is_a_flag() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stops_the_answer() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_within_a_second_leaves() -> None:
    with stops_the_answer():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_late_second_press_is_another_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "TWICE_S", 0.01)
    with stops_the_answer() as stopped:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)
        assert stopped()
