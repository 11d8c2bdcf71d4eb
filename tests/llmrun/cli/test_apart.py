"""Work in a thread of its own, and Ctrl-C while it runs."""

import os
import signal
import threading
import time

import pytest

from llmrun.cli.apart import Stopped, apart, check


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
