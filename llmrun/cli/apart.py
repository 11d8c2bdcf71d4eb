"""Parallel work kept out of the main thread.

OpenMP, which torch computes with, keeps a team of helper threads for each thread that ever computed
in parallel, until that thread ends. The engine has a thread of its own; a second team beside its
own makes every wait slow: on 2 cores decode took 2 to 3 times as long.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
Stopped = Callable[[], bool]


def apart(work: Callable[[Stopped], Result]) -> Result:
    """Do the work in a thread that ends with it.

    The work gets a function to ask now and then whether Ctrl-C was pressed; it should then end
    by ``check`` below. KeyboardInterrupt is raised here once it has ended.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as thread:
        future = thread.submit(work, stop.is_set)
        try:
            return future.result()
        except KeyboardInterrupt:
            stop.set()
            raise


def check(stopped: Stopped) -> None:
    """Leave the work if it is no longer wanted; nobody sees the error."""
    if stopped():
        raise InterruptedError
