"""Ctrl-C while an answer comes: the first stops the answer, a second within a second the program.

The first only sets a flag that the engine polls, so nothing is cut in the middle of a write.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from llmrun.kernels.ops import Interrupt

TWICE_S = 1.0
"""Two presses at most this far apart mean: leave."""


@contextlib.contextmanager
def stops_the_answer() -> Iterator[Interrupt]:
    """Within the block Ctrl-C turns the yielded question true; twice: KeyboardInterrupt."""
    stopped = threading.Event()
    last_s = float("-inf")

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s <= TWICE_S:
            raise KeyboardInterrupt
        last_s = now_s
        stopped.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)
