"""Section ``crossover``: when dequantizing first, then multiplying, is faster."""

from collections.abc import Iterator
from functools import partial

import torch

from gpu.bench import Bench
from gpu.compare import compare
from gpu.forms import sample
from gpu.journal import Values
from gpu.launches import launch, with_rows
from gpu.run import Case, Run
from gpu.shapes import Linears
from llmrun.kernels.gpu import large
from llmrun.kernels.gpu.arrays import SMALL

FORMS = ("bf16", "w8 g128", "w4 g128", "lut g64")
SHAPES = (Linears("o", (4096,), 4096, 1), Linears("o", (14_336,), 4096, 1))
FUSED = (8, 16, 32)
LONG = (16, 32, 64, 128, 256, 512, 1024)
TOLERANCE = 4e-3
"""Weights are rounded to bf16 on the way."""


def run(run: Run) -> None:
    """Measure."""
    for case in cases(run.bench):
        run.case(case)


def cases(bench: Bench) -> Iterator[Case]:
    """One for each shape and form, all widths in one."""
    shapes = (Linears("o", (128,), 256, 1),) if bench.dry else SHAPES
    for linears in shapes:
        for kind in FORMS:
            name = f"{linears.rows[0]}x{linears.k} {kind}"
            work = partial(_measure, bench, linears, kind)
            yield Case(name, work, partial(_measure, bench, linears, kind, warm=True))


def _measure(bench: Bench, linears: Linears, kind: str, *, warm: bool = False) -> Values:
    """Microseconds by rows: ``fused`` reads codes, ``long`` dequantizes and multiplies."""
    copies = 1 if warm or bench.dry else None
    one = launch(bench, linears, kind, 1, copies=copies)
    fused: dict[str, float] = {}
    for m in FUSED[:1] if bench.dry else FUSED:
        wide = with_rows(one, m)
        wide.check()
        if not warm:
            fused[str(m)] = round(bench.per_call(wide.calls) * 1e6, 1)
    scratch = large.Scratch(bench.device)
    picked, dense = sample(one.forms[0], bench.device)
    long: dict[str, float] = {}
    for t in (SMALL + 1,) if bench.dry else LONG:
        x = torch.randn(t, linears.k, generator=torch.Generator().manual_seed(t))
        x = x.to(bench.device, torch.bfloat16)
        y = torch.zeros(t, linears.rows[0], device=bench.device)
        calls = [
            partial(large.multiply, x, weight, None, y, scratch, add=None)
            for (weight,) in one.copies
        ]
        calls[0]()
        compare(y[:, picked], x.double() @ dense.T, TOLERANCE)
        if not warm:
            long[str(t)] = round(bench.per_call(calls) * 1e6, 1)
    at_most = [int(m) for m, us in fused.items() if us <= long.get(m, us)]
    return {"fused_us": fused, "long_us": long, "fused_up_to": max(at_most, default=0)}
