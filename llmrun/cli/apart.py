"""Work kept out of the main thread, so that Ctrl-C reaches the main thread at once.

Where torch computes it matters twice: OpenMP keeps a team of helper threads for each thread that
ever computed in parallel, until that thread ends. The engine has a thread of its own; a second team
beside its own makes every wait slow: on 2 cores decode took 2 to 3 times as long.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Other = TypeVar("Other")
Stopped = Callable[[], bool]

SWITCH_S = 0.001
"""How long one of two works may keep Python's lock while the other waits for it, in seconds. By
default 5 ms: then a work of many short native calls crawls, for it waits that long after each."""

LOOK_S = 0.05
"""How often the main thread looks for Ctrl-C while it waits."""


def apart(work: Callable[[Stopped], Result]) -> Result:
    """Do the work in a thread that ends with it.

    The work gets a function to ask now and then whether Ctrl-C was pressed; it should then end
    by ``check`` below. KeyboardInterrupt is raised here once it has ended. The thread is a daemon:
    work that never asks cannot keep the program from leaving at the second Ctrl-C.
    """
    stop = threading.Event()
    job = _Job(work, stop)
    _run([job], stop)
    return job.result()


def beside(
    first: Callable[[Stopped], Result], second: Callable[[Stopped], Other]
) -> tuple[Result, Other]:
    """Do two works at the same time, each as ``apart`` does; both have ended when this returns.

    When one fails, the other is asked to stop and the error of the first to fail is raised. A
    work that never asks is waited for.
    """
    stop = threading.Event()
    errors: list[BaseException] = []
    left, right = _Job(first, stop, errors), _Job(second, stop, errors)
    with _taking_turns():
        _run([left, right], stop)
    if errors:
        raise errors[0]
    return left.result(), right.result()


def _run(jobs: "list[_Job[Any]]", stop: threading.Event) -> None:
    threads = [threading.Thread(target=job.run, name="apart", daemon=True) for job in jobs]
    try:
        # Inside the try: the interrupt may arrive as soon as a thread runs.
        for thread in threads:
            thread.start()
        _await(jobs, threads)
    except KeyboardInterrupt:
        stop.set()
        _await(jobs, threads)
        raise


def _await(jobs: "Sequence[_Job[Any]]", threads: Sequence[threading.Thread]) -> None:
    """Wait for the works that have begun.

    Not by joining their threads: until Python 3.13 a join that an exception interrupts takes the
    thread for ended.
    """
    for job, thread in zip(jobs, threads, strict=True):
        while thread.ident is not None and not job.ended.is_set():
            # A signal that strikes just before a wait begins does not end it, hence short ones.
            job.ended.wait(LOOK_S)
        if thread.ident is not None:
            thread.join()  # what is left of it takes no time


@contextlib.contextmanager
def _taking_turns() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def check(stopped: Stopped) -> None:
    """Leave the work if it is no longer wanted; nobody sees the error."""
    if stopped():
        raise InterruptedError


class _Job(Generic[Result]):
    """A call and what came of it. An error stops whoever shares ``stop``; ``errors``: in order.

    ``ended`` is set when the call is over.
    """

    def __init__(
        self,
        work: Callable[[Stopped], Result],
        stop: threading.Event,
        errors: list[BaseException] | None = None,
    ) -> None:
        self._work = work
        self._stop = stop
        self._errors: list[BaseException] = [] if errors is None else errors
        self._results: list[Result] = []
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._results.append(self._work(self._stop.is_set))
        except BaseException as error:
            self._errors.append(error)  # raised again where the result is asked for
            self._stop.set()
        finally:
            self.ended.set()

    def result(self) -> Result:
        if self._errors:
            raise self._errors[0]
        return self._results[0]
