"""Run the engine in a thread of its own, so that a slow consumer never pauses it.

A generator only runs while its consumer asks for the next item: a terminal that takes 50 ms per
token would pause the engine for as long. ``drain`` lets the engine run ahead into a queue; stamps
are taken in the engine, so the latencies it reports stay those of the model.
"""

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import SimpleQueue

from llmrun.engine.events import Finish, TokenEvent
from llmrun.kernels.ops import Interrupt

Events = Generator[TokenEvent, None, Finish]


@dataclass(frozen=True)
class _End:
    """How the thread ended: a reason or an error."""

    finish: Finish = Finish.INTERRUPTED
    error: BaseException | None = None


def drain(factory: Callable[[Interrupt], Events]) -> Events:
    """Yield the events of ``factory(stopped)``, which runs in its own thread; return its finish.

    ``stopped`` turns true when the consumer leaves; the factory hands it to ``generate`` as
    ``interrupt`` (joined with an interrupt of its own, if it has one), so that prefill stops
    between chunks too. Errors of the engine are raised here, after the events before them.

    Use it as ``with contextlib.closing(drain(...)) as events``. Leaving the block, by ``break``,
    an error or KeyboardInterrupt, stops the engine, and returns when its running step is done:
    model and cache are then free for the next request. The thread alone uses the backend until
    then.
    """
    left = threading.Event()
    queue: SimpleQueue[TokenEvent | _End] = SimpleQueue()
    thread = threading.Thread(target=_run, args=(factory, left, queue), name="engine", daemon=True)
    thread.start()
    try:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
        return item.finish
    finally:
        left.set()
        thread.join()


def _run(
    factory: Callable[[Interrupt], Events],
    left: threading.Event,
    queue: SimpleQueue[TokenEvent | _End],
) -> None:
    """Body of the thread. Whatever ends it becomes the queue's last item, or ``drain`` hangs."""
    end = _End()
    try:
        events = factory(left.is_set)
        while not left.is_set():
            queue.put(next(events))
    except StopIteration as stop:
        end = _End(finish=stop.value)
    except BaseException as error:  # nothing is swallowed: the consumer raises it
        end = _End(error=error)
    queue.put(end)
