"""Work in a thread of its own, and Ctrl-C while it runs."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from llmrun.cli.apart import Stopped, apart, beside, check
from llmrun.errors import ModelFileError


def test_the_result_and_errors_come_back_and_the_thread_ends() -> None:
    before = threading.active_count()
    assert apart(lambda _: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(ZeroDivisionError):
        apart(lambda _: 1 // 0)
    assert threading.active_count() == before


def test_ctrl_c_ends_the_work_at_its_next_check() -> None:
    rounds = []

    def work(stopped: Stopped) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            rounds.append(1)
            time.sleep(0.01)
            check(stopped)

    with pytest.raises(KeyboardInterrupt):
        apart(work)
    assert rounds


def test_ctrl_c_is_raised_when_the_work_has_ended_and_not_before() -> None:
    ended = []

    def work(stopped: Stopped) -> None:
        time.sleep(0.02)  # the main thread waits by now
        os.kill(os.getpid(), signal.SIGINT)
        while not stopped():
            time.sleep(0.001)
        time.sleep(0.2)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        apart(work)
    assert ended == [True]


def test_ctrl_c_at_the_very_start_leaves_no_thread_behind() -> None:
    # The interrupt may strike while the thread is being started, before anybody waits for it.
    def work(stopped: Stopped) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not stopped():
            time.sleep(0.001)

    for _ in range(50):
        with pytest.raises(KeyboardInterrupt):
            apart(work)
    time.sleep(0.05)
    assert [t.name for t in threading.enumerate() if t.name == "apart"] == []


def test_two_works_run_at_the_same_time_and_both_results_come_back() -> None:
    before, interval = threading.active_count(), sys.getswitchinterval()
    meeting = threading.Barrier(2, timeout=10)

    def work(name: str) -> Callable[[Stopped], str]:
        def meet(_: Stopped) -> str:
            meeting.wait()  # breaks unless the other comes, too
            assert threading.current_thread() is not threading.main_thread()
            return name

        return meet

    assert beside(work("left"), work("right")) == ("left", "right")
    assert (threading.active_count(), sys.getswitchinterval()) == (before, interval)


@pytest.mark.parametrize("first_fails", [True, False])
def test_the_error_of_the_one_that_failed_comes_up_and_stops_the_other(first_fails: bool) -> None:
    ended = []

    def fails(_: Stopped) -> None:
        raise ModelFileError("broken")

    def goes_on(stopped: Stopped) -> None:
        try:
            while True:
                check(stopped)
                time.sleep(0.001)
        finally:
            ended.append(True)

    works = (fails, goes_on) if first_fails else (goes_on, fails)
    with pytest.raises(ModelFileError, match="broken"):
        beside(*works)
    assert ended == [True]


def test_work_that_never_asks_still_ends_before_an_error_comes_up() -> None:
    ended = []

    def deaf(_: Stopped) -> None:
        time.sleep(0.1)
        ended.append(True)

    with pytest.raises(ZeroDivisionError):
        beside(lambda _: 1 // 0, deaf)
    assert ended == [True]


def test_ctrl_c_ends_both_works() -> None:
    meeting = threading.Barrier(2, timeout=10)

    def work(stopped: Stopped) -> None:
        if meeting.wait() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            check(stopped)
            time.sleep(0.001)

    interval = sys.getswitchinterval()
    with pytest.raises(KeyboardInterrupt):
        beside(work, work)
    time.sleep(0.05)  # one that was only being started ends at its first check
    assert [t.name for t in threading.enumerate() if t.name == "apart"] == []
    assert sys.getswitchinterval() == interval
