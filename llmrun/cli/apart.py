"""Work kept out of the main thread, so that Ctrl-C reaches the main thread at once.

Where torch computes it matters twice: OpenMP keeps a team of helper threads for each thread that
ever computed in parallel, until that thread ends. The engine has a thread of its own; a second team
beside its own makes every wait slow: on 2 cores decode took 2 to 3 times as long.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")
Stopped = Callable[[], bool]


def apart(work: Callable[[Stopped], Result]) -> Result:
    """Do the work in a thread that ends with it.

    The work gets a function to ask now and then whether Ctrl-C was pressed; it should then end
    by ``check`` below. KeyboardInterrupt is raised here once it has ended. The thread is a daemon:
    work that never asks cannot keep the program from leaving at the second Ctrl-C.
    """
    stop = threading.Event()
    job = _Job(work, stop)
    thread = threading.Thread(target=job.run, name="apart", daemon=True)
    try:
        # Inside the try: the interrupt may arrive as soon as the thread runs.
        thread.start()
        thread.join()
    except KeyboardInterrupt:
        stop.set()
        while thread.is_alive():  # false, too, if the interrupt came before it had begun
            thread.join()
        raise
    return job.result()


def check(stopped: Stopped) -> None:
    """Leave the work if it is no longer wanted; nobody sees the error."""
    if stopped():
        raise InterruptedError


class _Job(Generic[Result]):
    """A call and what came of it."""

    def __init__(self, work: Callable[[Stopped], Result], stop: threading.Event) -> None:
        self._work = work
        self._stop = stop
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._work(self._stop.is_set))
        except BaseException as error:
            self._error = error  # raised again where the result is asked for

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._results[0]
