"""Section ``gemv``: how fast the linears of a decode step read their weights.

Every shape of three models, in every form, for 1 to 16 rows. Each result is checked first.
"""

from collections.abc import Iterator
from functools import partial

from gpu.bench import Bench
from gpu.journal import Values
from gpu.launches import launch, with_rows
from gpu.run import Case, Run
from gpu.shapes import Linears, models

FORMS = ("bf16", "w8 g128", "w4 g128", "w4 g32", "lut g64")
DRY_FORMS = ("w4 g128",)
WIDTHS = (1, 4, 8, 16)


def run(run: Run) -> None:
    """Measure, the largest model and the narrowest steps first."""
    for case in cases(run.bench):
        run.case(case)


def cases(bench: Bench) -> Iterator[Case]:
    """One case for each shape and form, all widths in one."""
    for model in models(bench.dry):
        for linears in model.linears:
            for kind in DRY_FORMS if bench.dry else FORMS:
                yield Case(
                    name(model.name, linears.role, kind),
                    partial(_measure, bench, linears, kind),
                    partial(_warm, bench, linears, kind),
                )


def name(model: str, role: str, kind: str) -> str:
    """What a case is called."""
    return f"{model} {role} {kind}"


def _measure(bench: Bench, linears: Linears, kind: str) -> Values:
    """``us`` and ``gb_per_s`` by width; ``error`` the largest."""
    one = launch(bench, linears, kind, 1)
    errors, us, rates = [], {}, {}
    for m in _widths(bench):
        wide = with_rows(one, m)
        errors.append(wide.check())
        seconds = bench.per_call(wide.calls)
        us[str(m)] = round(seconds * 1e6, 2)
        rates[str(m)] = round(one.nbytes / seconds / 1e9, 1)
    return {"bytes": one.nbytes, "us": us, "gb_per_s": rates, "error": float(f"{max(errors):.2g}")}


def _warm(bench: Bench, linears: Linears, kind: str) -> None:
    one = launch(bench, linears, kind, 1, copies=1)
    for m in _widths(bench):
        wide = with_rows(one, m)
        wide.run(wide.copies[0])


def _widths(bench: Bench) -> tuple[int, ...]:
    return WIDTHS[:1] if bench.dry else WIDTHS
