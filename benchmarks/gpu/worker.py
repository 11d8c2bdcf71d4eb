"""A worker: runs sections in a process of its own and reports over a pipe.

``python -m gpu.worker FD`` reads its orders as one JSON object from standard input: ``dry``,
``sections`` (name and latest end by the monotonic clock), ``done`` (cases of the first of them that
need not run again) and ``facts``.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from gpu.plan import LEAST_S

Emit = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Work through the orders."""
    orders = json.load(sys.stdin)
    pipe = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def emit(record: Mapping[str, Any]) -> None:
        pipe.write(json.dumps(record) + "\n")
        pipe.flush()

    @cache
    def bench() -> Any:  # noqa: ANN401 - imports torch, so not before a section needs it
        from gpu.bench import open_bench

        return open_bench(orders["dry"], orders["facts"])

    done = set(orders["done"])
    for name, end_s in orders["sections"].items():
        _section(name, end_s, done, emit, bench)
        done = set()


def _section(name: str, end_s: float, done: set[str], emit: Emit, bench: Callable[[], Any]) -> None:
    def ended(state: str, why: str | None = None) -> None:
        seconds = round(time.monotonic() - start_s, 2)
        emit({"at": "end", "section": name, "state": state, "seconds": seconds, "why": why})

    start_s = time.monotonic()
    emit({"at": "section", "section": name})
    if end_s - start_s < LEAST_S:
        ended("skipped", "no time left")
        return
    try:
        on = bench()
        from gpu.run import Run

        import_module(f"gpu.{name}").run(Run(name, on, emit, end_s, done))
    except Exception as error:  # the other sections still count
        traceback.print_exc()
        ended("failed", f"{type(error).__name__}: {error}"[:400])
        return
    ended("done")


if __name__ == "__main__":
    main()
