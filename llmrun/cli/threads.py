"""How many threads a backend gets: what the user asked for, within what this process may use."""

from collections.abc import Callable
from dataclasses import dataclass

from llmrun.kernels.cpu.topology import Threads, recommended_threads


@dataclass(frozen=True)
class ThreadChoice:
    """Threads of the prompt (``prefill``) and of each further token (``decode``).

    ``decode`` None: the user left it open, and a backend that can finds it by trial, up to
    ``prefill``. ``why`` says where ``prefill`` comes from; ``notes`` are requests that were cut.
    """

    prefill: int
    decode: int | None
    why: str
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Threads a backend must be able to run at once."""
        return max(self.prefill, self.decode or 1)


def choose_threads(
    threads: int | None = None,
    prefill: int | None = None,
    decode: int | None = None,
    machine: Callable[[], Threads] = recommended_threads,
) -> ThreadChoice:
    """Settle ``--threads``, ``--threads-prefill`` and ``--threads-decode``.

    None, 0 and -1 leave a number open. The first stands for both of the others where they are
    open. More threads than can run at once are cut, with a note.
    """
    here = machine()
    notes = []
    for option, asked in (
        ("--threads", threads),
        ("--threads-prefill", prefill),
        ("--threads-decode", decode),
    ):
        if asked is not None and asked > here.most:
            waits = f"more would only wait for others ({here.limit})"
            notes.append(f"{option} {asked} is cut to {here.most}: {waits}")
    both = _within(threads, here.most)
    first = _within(prefill, here.most) or both
    return ThreadChoice(
        prefill=first or here.count,
        decode=_within(decode, here.most) or both,
        why="as asked" if first else here.why,
        notes=tuple(notes),
    )


def usable_processors() -> int:
    """Threads that can run at once: processors by affinity, cut by the container's quota."""
    return recommended_threads().most


def _within(asked: int | None, most: int) -> int | None:
    return min(asked, most) if asked is not None and asked > 0 else None
