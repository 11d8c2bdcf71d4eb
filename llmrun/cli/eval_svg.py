"""Charts of evaluations as inline SVG for the report: no scripts, colours from the page's styles.

Series are coloured by the classes ``s0`` to ``s7`` and named at their ends; what a point says
stands in its tooltip.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from llmrun.cli.eval_plot import LIMITS, kl_range
from llmrun.cli.eval_record import EvalRecord
from llmrun.cli.eval_table import decibels, number

COLOURS = 8
WIDTH, HEIGHT = 680, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 182, 14, 42


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value, inside the axis."""
        low, high, v = (
            (math.log(x) if self.log else x) for x in (self.low, self.high, self._inside(value))
        )
        return self.start + (self.end - self.start) * (v - low) / (high - low)

    def _inside(self, value: float) -> float:
        return min(max(value, self.low), self.high)


def across(low: float, high: float) -> Axis:
    """The horizontal axis of a chart."""
    return Axis(low, high, LEFT, WIDTH - RIGHT)


def upright(low: float, high: float, *, log: bool = False) -> Axis:
    """The vertical axis of a chart."""
    return Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def kl_by_bits(records: Sequence[EvalRecord]) -> str:
    """Mean KL (logarithmic) against bits per weight, verdicts as lines."""
    points = [
        (i, record.weighed.bits_per_weight, kl)
        for i, record in enumerate(records)
        if (kl := record.fidelity.kl.mean) is not None and kl > 0
    ]
    if not points:
        return ""
    bits, kls = [p[1] for p in points], [p[2] for p in points]
    x = across(math.floor(min(bits) - 0.25), math.ceil(max(bits) + 0.25))
    y = upright(min(*kls, 0.002) / 1.6, max(*kls, 0.1) * 1.6, log=True)
    parts = [_grid_x(x, range(int(x.low), int(x.high) + 1), "bits per weight")]
    parts += [_tick_y(y, tick, f"{tick:g}") for tick in _decades(y)]
    for limit, name in LIMITS:
        at = y.at(limit)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, "limit"))
        parts.append(_text(WIDTH - RIGHT + 6, at + 4, f"{name} ≤ {limit:g}", "note"))
    for i, bit, kl in sorted(points, key=lambda p: p[1]):
        name = records[i].subject.scheme
        parts.append(_dot(i, x.at(bit), y.at(kl), 6, f"{name}: KL {number(kl)}, {bit:.2f} bits"))
        parts.append(_text(x.at(bit) + 10, y.at(kl) - 7, name, f"name t{i % COLOURS}"))
    return _svg(parts, "Mean KL against bits per weight")


def kl_by_layer(records: Sequence[EvalRecord]) -> str:
    """KL behind each layer (logarithmic), a line for each scheme; without what is 0."""
    series = [record.measured.kl_by_layer for record in records]
    found = kl_range([value for values in series for value in values])
    if found is None:
        return ""
    y = upright(*found, log=True)
    ticks = [_tick_y(y, tick, f"{tick:g}") for tick in _decades(y)]
    shown = [
        [(n, value, f"KL {number(value)}") for n, value in enumerate(values) if value > 0]
        for values in series
    ]
    return _svg([*_layers(len(series[0]), ticks), *_by_layer(records, shown, y)], "KL by layer")


def sqnr_by_layer(records: Sequence[EvalRecord]) -> str:
    """Decibels behind each layer, a line for each scheme."""
    series = [record.measured.sqnr_db for record in records]
    finite = [value for values in series for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = 5 * math.floor(min(finite) / 5), 5 * math.ceil(max(finite) / 5)
    high = max(high, low + 5)
    y = upright(low, high)
    ticks = [_tick_y(y, tick, f"{tick} dB") for tick in range(low, high + 1, _step(low, high))]
    shown = [
        [(n, value, decibels(value)) for n, value in enumerate(values) if math.isfinite(value)]
        for values in series
    ]
    parts = [*_layers(len(series[0]), ticks), *_by_layer(records, shown, y)]
    return _svg(parts, "Signal to noise of hidden states by layer")


def _layers(count: int, ticks: Sequence[str]) -> list[str]:
    step = max(1, -(-count // 8))
    return [_grid_x(across(0, max(1, count - 1)), range(0, count, step), "layer"), *ticks]


def _by_layer(
    records: Sequence[EvalRecord], series: Sequence[Sequence[tuple[int, float, str]]], y: Axis
) -> list[str]:
    """A line for each scheme: of its points layer, value and what it says."""
    x = across(0, max(1, len(records[0].measured.sqnr_db) - 1))
    parts, ends = [], []
    for i, (record, points) in enumerate(zip(records, series, strict=True)):
        if not points:
            continue
        path = " ".join(f"{x.at(n):.1f},{y.at(value):.1f}" for n, value, _ in points)
        parts.append(f'<polyline class="line l{i % COLOURS}" points="{path}"/>')
        name = record.subject.scheme
        parts += [
            _dot(i, x.at(n), y.at(value), 2.5, f"{name}, behind layer {n}: {said}")
            for n, value, said in points
        ]
        ends.append((y.at(points[-1][1]), i, name))
    return [*parts, *_names(ends)]


def kl_by_percentile(records: Sequence[EvalRecord]) -> str:
    """How KL is spread over the positions, from the median to the worst one."""
    names = ("median", "p90", "p95", "p99", "p99_9", "max")
    labels = ("50 %", "90 %", "95 %", "99 %", "99.9 %", "max")
    series = [
        [
            (place, value)
            for place, name in enumerate(names)
            if (value := getattr(record.fidelity.kl, name)) is not None and value > 0
        ]
        for record in records
    ]
    values = [value for points in series for _, value in points]
    if not values:
        return ""
    x = across(0, len(names) - 1)
    y = upright(min(values) / 1.5, max(values) * 1.5, log=True)
    parts = [
        _text(x.at(i), HEIGHT - BOTTOM + 18, label, "tick mid") for i, label in enumerate(labels)
    ]
    parts += [_line(x.at(i), TOP, x.at(i), HEIGHT - BOTTOM, "grid") for i in range(len(labels))]
    parts.append(
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "share of the positions", "tick mid")
    )
    parts += [_tick_y(y, tick, f"{tick:g}") for tick in _decades(y)]
    ends = []
    for i, (record, points) in enumerate(zip(records, series, strict=True)):
        if not points:
            continue
        path = " ".join(f"{x.at(place):.1f},{y.at(value):.1f}" for place, value in points)
        parts.append(f'<polyline class="line l{i % COLOURS}" points="{path}"/>')
        name = record.subject.scheme
        parts += [
            _dot(i, x.at(place), y.at(v), 3.5, f"{name}, {labels[place]}: KL {number(v)}")
            for place, v in points
        ]
        ends.append((y.at(points[-1][1]), i, name))
    parts += _names(ends)
    return _svg(parts, "Percentiles of KL")


def kl_by_confidence(records: Sequence[EvalRecord]) -> str:
    """Mean KL where the reference is more or less sure, a bar for each scheme."""
    buckets = [record.fidelity.kl_by_confidence for record in records]
    most = max((bucket.kl or 0.0 for row in buckets for bucket in row), default=0.0)
    if most <= 0:
        return ""
    groups = len(buckets[0])
    top = _round_up(most)
    y = upright(0, top)
    room = (WIDTH - RIGHT - LEFT) / groups
    wide = min(34.0, 0.8 * room / len(records))
    parts = [_tick_y(y, top * part / 4, number(top * part / 4)) for part in range(5)]
    for group in range(groups):
        low, high = buckets[0][group].low, buckets[0][group].high
        middle = LEFT + room * (group + 0.5)
        parts.append(
            _text(middle, HEIGHT - BOTTOM + 18, f"{100 * low:.0f}-{100 * high:.0f} %", "tick mid")
        )
        for i, record in enumerate(records):
            bucket = buckets[i][group]
            if bucket.kl is None:
                continue
            left = middle + wide * (i - len(records) / 2)
            at = y.at(bucket.kl)
            said = f"{record.subject.scheme}: KL {number(bucket.kl)}, {bucket.tokens:,} positions"
            parts.append(
                f'<rect class="f{i % COLOURS}" x="{left:.1f}" y="{at:.1f}" width="{wide - 1:.1f}" '
                f'height="{HEIGHT - BOTTOM - at:.1f}"><title>{escape(said)}</title></rect>'
            )
    parts.append(
        _text(
            (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 6,
            "the reference's largest probability",
            "tick mid",
        )
    )
    step = 18
    parts += [
        f'<rect class="f{i % COLOURS}" x="{WIDTH - RIGHT + 8}" y="{TOP + step * i}" width="10" '
        f'height="10"/>' + _text(WIDTH - RIGHT + 23, TOP + step * i + 9, r.subject.scheme, "note")
        for i, r in enumerate(records)
    ]
    return _svg(parts, "Mean KL by the reference's confidence")


def _svg(parts: Sequence[str], title: str) -> str:
    base = _line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join([*parts[:1], base, *parts[1:]])}</svg>"
    )


def _grid_x(x: Axis, ticks: Sequence[int], label: str) -> str:
    parts = []
    for tick in ticks:
        at = x.at(tick)
        parts.append(_line(at, TOP, at, HEIGHT - BOTTOM, "grid"))
        parts.append(_text(at, HEIGHT - BOTTOM + 18, str(tick), "tick mid"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, label, "tick mid"))
    return "".join(parts)


def _tick_y(y: Axis, value: float, label: str) -> str:
    at = y.at(value)
    return _line(LEFT, at, WIDTH - RIGHT, at, "grid") + _text(LEFT - 8, at + 4, label, "tick end")


def _names(ends: Sequence[tuple[float, int, str]]) -> list[str]:
    """Names at the ends of lines, moved apart where they would lie on each other."""
    parts, last = [], -math.inf
    for at, i, name in sorted(ends):
        last = max(at, last + 15)
        parts.append(_text(WIDTH - RIGHT + 8, last + 4, name, f"name t{i % COLOURS}"))
    return parts


def _decades(y: Axis) -> list[float]:
    """Powers of ten on the axis, and steps between them where these are few."""
    exponents = range(math.floor(math.log10(y.low)), math.ceil(math.log10(y.high)) + 1)
    steps = (1,) if y.high > 100 * y.low else (1, 2, 5)
    ticks = [step * 10.0**e for e in exponents for step in steps]
    return [tick for tick in ticks if y.low <= tick <= y.high]


def _step(low: int, high: int) -> int:
    return 5 if high - low <= 40 else 10 if high - low <= 80 else 20


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)


def _dot(series: int, x: float, y: float, radius: float, said: str) -> str:
    return (
        f'<circle class="f{series % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
        f"<title>{escape(said)}</title></circle>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
