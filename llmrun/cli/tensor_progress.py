"""The progress of writing a checkpoint, tensor by tensor, told to a store's Progress."""

import contextlib
from collections.abc import Callable, Iterator

from llmrun.store.progress import Progress


@contextlib.contextmanager
def tensor_progress(progress: Progress, label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A transfer told as ``(tensor, bytes done, bytes in all)``; it starts with the first."""
    done_bytes: int | None = None

    def on_tensor(name: str, reached: int, total: int) -> None:
        nonlocal done_bytes
        if done_bytes is None:
            progress.start(label, total)
            done_bytes = 0
        progress.advance(reached - done_bytes)
        done_bytes = reached

    try:
        yield on_tensor
    finally:
        if done_bytes is not None:
            progress.finish()
