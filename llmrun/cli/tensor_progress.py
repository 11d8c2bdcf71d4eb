"""The progress of work on a model's tensors or layers, told to a store's Progress."""

import contextlib
from collections.abc import Callable, Iterator

from llmrun.store.progress import Progress


@contextlib.contextmanager
def tensor_progress(
    progress: Progress, label: str, unit: str = "bytes"
) -> Iterator[Callable[[str, int, int], None]]:
    """Work told as ``(tensor or layer, done, in all)``, in bytes or ``unit``; it starts with the
    first."""
    done: int | None = None

    def on_work(name: str, reached: int, total: int) -> None:
        nonlocal done
        if done is None:
            progress.start(label, total, unit)
            done = 0
        progress.advance(reached - done)
        done = reached

    try:
        yield on_work
    finally:
        if done is not None:
            progress.finish()
