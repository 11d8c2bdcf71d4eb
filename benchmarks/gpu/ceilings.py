"""Section ``ceilings``: what the card can do at most, which all shares are shares of."""

import torch

from gpu.bench import Bench
from gpu.journal import GOOD, Values
from gpu.probes import READ_BLOCK, READ_TURNS, read
from gpu.run import Case, Run, WrongError

STREAM_BYTES = 4 << 30


def run(run: Run) -> None:
    """Measure reading, copying and multiplying."""
    found: dict[str, Values] = {}
    for name, work in (("read", _read), ("copy", _copy), ("matmul", _matmul)):

        def keep(name: str = name, work: object = work) -> Values:
            found[name] = work(run.bench)  # type: ignore[operator]
            return found[name]

        if run.case(Case(name, keep)) == GOOD and name != "copy":
            run.fact(*next(iter(found[name].items())))


def _read(bench: Bench) -> Values:
    unit = READ_BLOCK * READ_TURNS
    units = 2 if bench.dry else min(STREAM_BYTES, _free() // 4) // (4 * unit)
    source = torch.ones(units * unit, dtype=torch.int32, device=bench.device)
    out = torch.zeros(units, dtype=torch.int32, device=bench.device)
    read(source, out)
    if not bool((out == unit).all()):
        raise WrongError("the sums are wrong")
    seconds = bench.per_call([lambda: read(source, out)])
    return {"read_gb_per_s": round(source.nbytes / seconds / 1e9, 1)}


def _copy(bench: Bench) -> Values:
    size = 1 << 12 if bench.dry else min(STREAM_BYTES, _free() // 4)
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.per_call([lambda: target.copy_(source)])
    return {"copy_gb_per_s": round(2 * source.nbytes / seconds / 1e9, 1)}


def _matmul(bench: Bench) -> Values:
    size = 64 if bench.dry else 8192
    left, right = (
        torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(left)
    seconds = bench.per_call([lambda: torch.mm(left, right, out=out)] * 4, graph=False)
    return {"matmul_tflops": round(2 * size**3 / seconds / 1e12, 2)}


def _free() -> int:
    return torch.cuda.mem_get_info()[0]
