"""One of the processes that compile: ``python -m gpu.warm {"dry":..., "index":..., "count":...}``.

Prints one JSON line for each case and one at the end, about the kernels it compiled.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

SECTIONS = ("e2e", "correctness", "gemv", "crossover", "attention")
"""Those whose cases have kernels to compile; the longest come first."""


def main() -> None:
    """Do one share of the cases."""
    orders = json.loads(sys.argv[1])
    from gpu.bench import open_bench

    bench = open_bench(orders["dry"], {})
    works = [*_works(bench)][orders["index"] :: orders["count"]]
    for name, work in works[-1:] if orders["dry"] else works:
        start_s = time.monotonic()
        why = _tried(work, bench)
        _say({"case": name, "seconds": round(time.monotonic() - start_s, 2), "why": why})
        if not bench.alive():
            break
    _say(_kernels())


def _works(bench: Any) -> Iterator[tuple[str, Callable[[], object]]]:  # noqa: ANN401
    for section in SECTIONS:
        try:
            module = import_module(f"gpu.{section}")
        except ImportError:
            continue  # the section itself will say so
        for case in module.cases(bench):
            if case.warm is not None:
                yield f"{section}: {case.name}", case.warm


def _tried(work: Callable[[], object], bench: Any) -> str | None:  # noqa: ANN401
    try:
        work()
        bench.synchronize()
    except Exception as error:  # to be met again, and judged, where the case belongs
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _kernels() -> dict[str, object]:
    """How many were compiled here, and which of them keep registers in memory."""
    from triton.runtime.jit import JITFunction

    compiled = []
    for name, module in list(sys.modules.items()):
        if name.startswith("llmrun.kernels.gpu"):
            for held in vars(module).values():
                if isinstance(held, JITFunction) and held.__module__ == name:
                    for cached in held.device_caches.values():
                        compiled += [(held.__name__, kernel) for kernel in cached[0].values()]
    spilled = sorted({name for name, kernel in compiled if getattr(kernel, "n_spills", 0)})
    return {"kernels": len(compiled), "spilled": spilled}


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
