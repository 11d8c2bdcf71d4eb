"""Section ``gap``: what it costs that one kernel of a graph waits for the one before.

``ITL = bytes / bandwidth + launches * gap`` is the model the goals are made with.
"""

import torch

from gpu.bench import Bench
from gpu.journal import Values
from gpu.launches import launch
from gpu.probes import step
from gpu.run import Case, Run, WrongError
from gpu.shapes import Linears, models

CHAIN = 200


def run(run: Run) -> None:
    """Measure empty kernels, with and without early launches, and real ones."""
    bench = run.bench
    run.case(Case("empty", lambda: _empty(bench, early=False)))
    if bench.dry or torch.cuda.get_device_capability()[0] >= 9:
        run.case(Case("empty, early launch", lambda: _empty(bench, early=not bench.dry)))
    for model in models(bench.dry):
        linears = next(one for one in model.linears if one.role == "o")
        for kind in ("bf16", "w4 g128"):
            run.case(
                Case(f"{model.name} o {kind}", lambda on=linears, kind=kind: _real(bench, on, kind))
            )


def _empty(bench: Bench, *, early: bool) -> Values:
    chain = 4 if bench.dry else CHAIN
    cell = torch.zeros(1, dtype=torch.int32, device=bench.device)
    calls = [lambda: step(cell, early=early)] * chain
    seconds = bench.per_call(calls)
    cell.zero_()
    for call in calls:
        call()
    if int(cell) != chain:
        raise WrongError(f"{int(cell)} of {chain} steps were counted")
    return {"us": round(seconds * 1e6, 3)}


def _real(bench: Bench, linears: Linears, kind: str) -> Values:
    """Products that all add to one h, beside the time of reading their weights at the ceiling."""
    one = launch(bench, linears, kind, 1)
    one.check()
    calls = one.calls * (1 if bench.dry else max(1, CHAIN // len(one.calls)))
    seconds = bench.per_call(calls)
    rate = bench.facts.get("read_gb_per_s")
    floor_us = one.nbytes / rate / 1e3 if rate else None
    return {
        "us": round(seconds * 1e6, 2),
        "floor_us": None if floor_us is None else round(floor_us, 2),
        "gap_us": None if floor_us is None else round(seconds * 1e6 - floor_us, 2),
    }
