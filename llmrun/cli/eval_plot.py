"""Charts of evaluations in block characters: they need no colour and pipe as text.

KL by layer, KL by the reference's confidence, and, of several schemes, KL against bits per weight.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from llmrun.cli.eval_record import EvalRecord
from llmrun.cli.eval_table import number
from llmrun.quant.fidelity import GOOD_KL, LOSSLESS_KL, VISIBLE_KL

WIDEST, NARROWEST = 100, 40
"""Columns of a chart, whatever the terminal has."""

HEIGHT = 8
"""Lines of a column chart."""

SCATTER_HEIGHT = LINES_HEIGHT = 15
"""Lines of the others."""

LIMITS = ((LOSSLESS_KL, "lossless-ish"), (GOOD_KL, "good"), (VISIBLE_KL, "visible"))
"""KL up to which a verdict holds."""

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_SIGNS = "●▲■◆○△□◇"
DECADES = 4
"""Powers of ten below the largest KL that are drawn; what is smaller stands at the bottom."""

_AXIS = 7
"""Columns left of a chart: its labels and the axis."""


def charts(records: Sequence[EvalRecord], columns: int) -> str:
    """All charts there are to draw, in at most ``columns``."""
    width = max(NARROWEST, min(columns, WIDEST))
    if len(records) > 1:
        drawn = [kl_by_bits(records, width), kl_side_by_side(records, width)]
    else:
        drawn = [kl_by_layer(records[0], width), kl_by_confidence(records[0], width)]
    return "\n\n".join(drawn) + "\n"


def kl_by_layer(record: EvalRecord, width: int) -> str:
    """Columns: KL behind each layer, on a logarithmic scale. Empty: 0; x: not finite."""
    values = record.measured.kl_by_layer
    title = f"{record.subject.scheme}: KL by layer, logarithmic, lower is better"
    ends = kl_range(values)
    if ends is None:
        return f"{title}: nothing to draw"
    low, high = ends
    room = width - _AXIS
    wide = max(1, min(room // len(values), 3))
    bins = _merged(values, room // wide)

    def level(value: float) -> int:
        return max(1, round(8 * HEIGHT * _share(value, low, high))) if value > 0 else 0

    rows = []
    for line in range(HEIGHT - 1, -1, -1):
        cells = [
            "x" if math.isnan(value) else _EIGHTHS[min(8, max(0, level(value) - 8 * line))]
            for value in bins
        ]
        label = {HEIGHT - 1: _tick(high), 0: _tick(low)}.get(line, "")
        rows.append(f"{label:>{_AXIS - 2}} │" + "".join(cell * wide for cell in cells))
    return "\n".join([title, *rows, *_layer_axis(len(values), wide * len(bins))])


def kl_side_by_side(records: Sequence[EvalRecord], width: int) -> str:
    """Lines of several schemes on one scale; each has a sign of its own, named at its end."""
    series = [record.measured.kl_by_layer for record in records]
    names = [record.subject.scheme for record in records]
    title = "KL by layer, logarithmic, lower is better"
    found = kl_range([value for values in series for value in values])
    if found is None:
        return f"{title}: nothing to draw"
    low, high = found
    room = width - _AXIS - max(map(len, names)) - 1
    count = len(series[0])
    wide = max(1, min(room // count, 3))
    bins = [_merged(values, room // wide) for values in series]
    room = wide * len(bins[0])
    grid = [[" "] * room for _ in range(LINES_HEIGHT)]
    ends = [""] * LINES_HEIGHT

    def line(value: float) -> int:
        return round((1 - _share(value, low, high)) * (LINES_HEIGHT - 1))

    for sign, name, values in zip(_signs(len(names)), names, bins, strict=True):
        for place, value in enumerate(values):
            grid[line(value)][place * wide + wide // 2] = "x" if math.isnan(value) else sign
        end = line(values[-1])
        ends[end] += f" {name}" if not ends[end] else f", {name}"
    labels = {0: _tick(high), LINES_HEIGHT - 1: _tick(low)}
    rows = [
        f"{labels.get(i, ''):>{_AXIS - 2}} │{''.join(cells)}{end}".rstrip()[:width]
        for i, (cells, end) in enumerate(zip(grid, ends, strict=True))
    ]
    return "\n".join([title, *rows, *_layer_axis(count, room)])


def kl_range(values: Sequence[float]) -> tuple[float, float] | None:
    """Numbers of one digit around what of the values has a logarithm; None if nothing has."""
    drawn = [value for value in values if value > 0]
    if not drawn:
        return None
    high = _one_digit(max(drawn), math.ceil)
    low = _one_digit(max(min(drawn) / 1.25, high / 10**DECADES), math.floor)
    return low, high


def _one_digit(value: float, towards: Callable[[float], int]) -> float:
    exponent = math.floor(math.log10(value))
    return towards(value / 10.0**exponent) * 10.0**exponent


def _share(value: float, low: float, high: float) -> float:
    """Of the height, from 0 to 1; nan is at the top."""
    if math.isnan(value):
        return 1.0
    return math.log(min(max(value, low), high) / low) / math.log(high / low)


def _tick(value: float) -> str:
    text = f"{value:.3g}"
    return text if len(text) <= _AXIS - 2 else f"{value:.0e}".replace("e-0", "e-")


def _signs(count: int) -> list[str]:
    return [_SIGNS[i % len(_SIGNS)] for i in range(count)]


def _layer_axis(count: int, room: int) -> list[str]:
    last = f"{count - 1}"
    middle = " " * max(1, room - len("layer 0") - len(last))
    return [" " * (_AXIS - 1) + "└" + "─" * room, f"{' ' * _AXIS}layer 0{middle}{last}"]


def kl_by_confidence(record: EvalRecord, width: int) -> str:
    """Bars: mean KL where the reference is more or less sure of the next token."""
    buckets = record.fidelity.kl_by_confidence
    most = max((bucket.kl or 0.0 for bucket in buckets), default=0.0) or 1.0
    room = width - 36
    lines = ["mean KL by how sure the reference is of the next token"]
    for bucket in buckets:
        bar = _bar((bucket.kl or 0.0) / most, room)
        range_ = f"{100 * bucket.low:.0f}-{100 * bucket.high:.0f} %"
        lines.append(
            f"{range_:>9}  {number(bucket.kl):<8} {bar:<{room}} {bucket.tokens:>6,} tokens"
        )
    return "\n".join(lines)


def kl_by_bits(records: Sequence[EvalRecord], width: int) -> str:
    """Points: mean KL, on a logarithmic scale, against bits per weight; verdicts as lines."""
    points = [
        (record.weighed.bits_per_weight, kl, record.subject.scheme)
        for record in records
        if (kl := record.fidelity.kl.mean) is not None and kl > 0
    ]
    title = "mean KL against bits per weight, lower left is better"
    if not points:
        return f"{title}: nothing to draw"
    bits, kls = [p[0] for p in points], [p[1] for p in points]
    left, right = math.floor(min(bits) - 0.25), math.ceil(max(bits) + 0.25)
    low = math.log10(min(min(kls), LOSSLESS_KL) / 1.5)
    high = math.log10(max(max(kls), VISIBLE_KL) * 1.5)
    room = width - _AXIS
    grid = [[" "] * room for _ in range(SCATTER_HEIGHT)]
    labels = [""] * SCATTER_HEIGHT

    def row(kl: float) -> int:
        return round((high - math.log10(kl)) / (high - low) * (SCATTER_HEIGHT - 1))

    def column(bit: float) -> int:
        return round((bit - left) / (right - left) * (room - 1))

    for limit, name in LIMITS:
        line = row(limit)
        grid[line] = list("┈" * room)
        _put(grid[line], room - len(name) - 1, f" {name}")
        labels[line] = f"{limit:g}"
    for bit, kl, name in sorted(points):
        _mark(grid, row(kl), column(bit), name)
    rows = [
        f"{label:>{_AXIS - 2}} │" + "".join(cells).rstrip()
        for label, cells in zip(labels, grid, strict=True)
    ]
    return "\n".join([title, *rows, *_bit_axis(left, right, room, column)])


def _bit_axis(left: int, right: int, room: int, column: Callable[[float], int]) -> list[str]:
    step = max(1, (right - left) // 8)
    axis, ticks = ["─"] * room, [" "] * room
    for bit in range(left, right + 1, step):
        axis[column(bit)] = "┴"
        _put(ticks, max(0, column(bit) - len(str(bit)) // 2), str(bit))
    return [
        " " * (_AXIS - 1) + "└" + "".join(axis),
        " " * _AXIS + "".join(ticks).rstrip(),
    ]


def _mark(grid: list[list[str]], row: int, column: int, name: str) -> None:
    """A point with its name beside it, where there is room."""
    room = len(grid[row])
    for place in (column + 2, column - len(name) - 1):
        end = place + len(name)
        if place < 0 or end > room:
            continue
        if all(cell in " ┈" for cell in grid[row][place:end]):
            _put(grid[row], place - 1, f" {name} ")
            break
    else:
        _put(grid[row], max(0, column - len(name) - 1), name)
    grid[row][column] = "●"


def _put(cells: list[str], start: int, text: str) -> None:
    for offset, character in enumerate(text):
        if 0 <= start + offset < len(cells):
            cells[start + offset] = character


def _bar(share: float, room: int) -> str:
    eighths = round(8 * room * min(max(share, 0.0), 1.0))
    full, part = divmod(eighths, 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[part : part + 1].strip()


def _merged(values: Sequence[float], most: int) -> list[float]:
    """At most so many values: the highest of each run; one that is not finite wins."""
    if len(values) <= most:
        return list(values)
    edges = [i * len(values) // most for i in range(most + 1)]
    runs = [values[a:b] for a, b in pairwise(edges)]
    return [next((v for v in run if math.isnan(v)), max(run)) for run in runs]
