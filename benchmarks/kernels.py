"""The CPU kernels by themselves, through the library, on every instruction set of this machine.

    python benchmarks/kernels.py [--isa avx2 avx512] [--quick] [--json FILE]

A product is the op ``linear_add``, quantizing its activations included; the weights stay in the
caches unless the table says "streamed". The fp32 loop (a dense f32 weight in the same op) is the
yardstick: its ratio holds on a machine whose clock wanders or is shared. Times are the best of
several, MAC/cycle are per thread.
"""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from clock import clock_hz
from common import SETS, machine, show_facts, show_table, usable
from probes import (
    Rate,
    Timer,
    attend_decode,
    attend_prefill,
    empty_op,
    product,
    streamed,
)
from work import Facts

from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.topology import recommended_threads

FORMS = ("int4 g32", "int4 g32 +min", "int4 g128 +zero", "IQ4_NL", "MXFP4", "int8 g128")
"""Kinds of storage forms, or GGUF types whose tables are integers (wide ones and narrow ones)."""
WIDTHS = (1, 2, 4, 5, 8, 10, 16, 64, 256)
YARDSTICK_WIDTHS = (10, 64, 256)
DEPTH = 4096


@dataclass(frozen=True)
class Gate:
    """Least MAC/cycle on AVX2, and over the fp32 loop (16 MAC/cycle there at most) anywhere."""

    form: str
    width: int
    mac_per_cycle: float
    over_fp32: float


GATES = (
    Gate("int4 g32", 10, 28, 1.75),
    Gate("int4 g32", 4, 25, 25 / 16),
    Gate("int4 g32", 1, 18, 18 / 16),
    Gate("int8 g128", 5, 20, 20 / 16),
)
ATTEND_GATE = 11.0
"""MAC/cycle of prefill's attention behind 4096 tokens."""
BARRIER_GATE_US = 1.5
LEAST_BARRIER_S = 5e-8
"""No line of memory gets from core to core and back in less."""


@dataclass(frozen=True)
class Report:
    """All measurements of one instruction set; ``products[form][width]``."""

    isa: str
    fp32_mac_per_s: float
    products: Mapping[str, Mapping[int, Rate]]
    streamed: Mapping[str, Rate]
    prefill: Rate
    decode: Rate


def main() -> None:
    """Measure and print."""
    options = _options()
    timer = Timer(repeats=3 if options.quick else 7)
    passes = 1 if options.quick else 3
    clock = clock_hz()
    names = list(usable(options.isa, options.threads))
    ceilings = _ceilings(CpuBackend(options.threads), clock)
    about = machine() | ceilings
    show_facts(about)
    barrier_us = _barrier_us(options.threads, timer)
    _show_barrier(barrier_us, options.threads)
    reports: dict[str, Report] = {}
    for _ in range(passes):  # neighbours come and go in seconds: no table is made at one moment
        for name in names:
            report = _measure(name, options.threads, timer)
            reports[name] = _better(reports[name], report) if name in reports else report
    for report in reports.values():
        _show(report, clock, options.threads)
    if options.json:
        document = {
            "schema": "llmrun.kernels/1",
            "machine": about | {"threads": options.threads, "barrier_us": barrier_us},
            "sets": [asdict(report) for report in reports.values()],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--isa", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--threads", type=int, default=recommended_threads().count)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def _ceilings(backend: CpuBackend, clock: float | None) -> Facts:
    return {
        "clock_ghz": None if clock is None else round(clock / 1e9, 3),
        "bandwidth_gb_per_s": round(backend.measure_bandwidth() / 1e9, 1),
    }


def _barrier_us(threads: int, timer: Timer) -> float | None:
    """What an op costs more with all threads than with one; None if they never ran together."""
    alone_s = empty_op(CpuBackend(1), timer)
    together_s = empty_op(CpuBackend(threads), timer, alone_s + LEAST_BARRIER_S)
    return None if math.isinf(together_s) else (together_s - alone_s) * 1e6


def _show_barrier(barrier_us: float | None, threads: int) -> None:
    if barrier_us is None:
        print(f"\nbarrier: unknown, {threads} threads never ran together (a busy machine?)")
        return
    met = "met" if barrier_us <= BARRIER_GATE_US else "MISSED"
    print(f"\nbarrier of {threads} threads: {barrier_us:.2f} us, at most {BARRIER_GATE_US}: {met}")


def _measure(isa: str, threads: int, timer: Timer) -> Report:
    def fresh() -> CpuBackend:
        return CpuBackend(threads, isa=isa)  # weights live as long as their backend

    backend = fresh()
    fp32 = [product(backend, timer, "f32", width) for width in YARDSTICK_WIDTHS]
    products = {
        form: {width: product(backend, timer, form, width) for width in WIDTHS} for form in FORMS
    }
    fp32 += [product(backend, timer, "f32", width) for width in YARDSTICK_WIDTHS]
    return Report(
        isa=isa,
        fp32_mac_per_s=max(one.mac_per_s for one in fp32),
        products=products,
        streamed={form: streamed(fresh(), timer, form) for form in FORMS},
        prefill=attend_prefill(fresh(), timer, DEPTH),
        decode=attend_decode(fresh(), timer, DEPTH),
    )


def _better(one: Report, other: Report) -> Report:
    """The better of two values in every place."""

    def best(a: Rate, b: Rate) -> Rate:
        return max(a, b, key=lambda rate: rate.mac_per_s)

    return Report(
        isa=one.isa,
        fp32_mac_per_s=max(one.fp32_mac_per_s, other.fp32_mac_per_s),
        products={
            form: {w: best(rate, other.products[form][w]) for w, rate in rates.items()}
            for form, rates in one.products.items()
        },
        streamed={form: best(rate, other.streamed[form]) for form, rate in one.streamed.items()},
        prefill=best(one.prefill, other.prefill),
        decode=best(one.decode, other.decode),
    )


def _show(report: Report, clock: float | None, threads: int) -> None:
    def cycles(mac_per_s: float) -> float | None:
        return None if clock is None else mac_per_s / clock / threads

    fp32 = report.fp32_mac_per_s
    print(f"\n{report.isa}: fp32 loop {fp32 / 1e9:.1f} GMAC/s, {_mac(cycles(fp32))}")
    header = ["  tokens", *(f"{form}: GMAC/s" for form in FORMS)]
    lines = []
    for width in WIDTHS:
        cells = [f"  {width}"]
        for form in FORMS:
            rate = report.products[form][width].mac_per_s
            cells.append(f"{rate / 1e9:.1f}, {_mac(cycles(rate))}, {rate / fp32:.2f} x fp32")
        lines.append(cells)
    cached = [report.products[form][1].bytes_per_s for form in FORMS]
    lines.append(["  1 cached", *(f"{rate / 1e9:.1f} GB/s" for rate in cached)])
    lines.append(
        ["  1 streamed", *(f"{report.streamed[f].bytes_per_s / 1e9:.1f} GB/s" for f in FORMS)]
    )
    show_table(header, lines)
    for name, attend in (("prefill of 256", report.prefill), ("decode", report.decode)):
        rate = attend.mac_per_s
        print(
            f"  attention, {name} behind {DEPTH}: {rate / 1e9:.1f} GMAC/s, {_mac(cycles(rate))}, "
            f"{attend.bytes_per_s / 1e9:.1f} GB/s of keys and values"
        )
    for gate in GATES:
        rate = report.products[gate.form][gate.width].mac_per_s
        over = rate / fp32
        met = "met" if over >= gate.over_fp32 else "MISSED"
        print(
            f"  gate {gate.form}, {gate.width} tokens: {over:.2f} x fp32, at least "
            f"{gate.over_fp32:.2f}: {met} ({_mac(cycles(rate))}, {gate.mac_per_cycle:g} on AVX2)"
        )
    attend_cycles = cycles(report.prefill.mac_per_s)
    if attend_cycles is not None:
        met = "met" if attend_cycles >= ATTEND_GATE else "MISSED"
        print(f"  gate attention: {_mac(attend_cycles)}, at least {ATTEND_GATE:g}: {met}")


def _mac(per_cycle: float | None) -> str:
    return "clock unknown" if per_cycle is None else f"{per_cycle:.1f} MAC/cycle"


if __name__ == "__main__":
    main()
