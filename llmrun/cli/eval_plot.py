"""Charts of evaluations in block characters: they need no colour and pipe as text.

Hidden states' signal to noise by layer, KL by the reference's confidence, and, of several schemes,
KL against bits per weight.
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
_AXIS = 7
"""Columns left of a chart: its labels and the axis."""


def charts(records: Sequence[EvalRecord], columns: int) -> str:
    """All charts there are to draw, in at most ``columns``."""
    width = max(NARROWEST, min(columns, WIDEST))
    if len(records) > 1:
        drawn = [kl_by_bits(records, width), sqnr_side_by_side(records, width)]
    else:
        drawn = [sqnr_by_layer(records[0], width), kl_by_confidence(records[0], width)]
    return "\n\n".join(drawn) + "\n"


def sqnr_by_layer(record: EvalRecord, width: int) -> str:
    """Columns: decibels behind each layer. Full height: the same states; x: not finite."""
    values = record.measured.sqnr_db
    low, high = _decibel_range(values)
    room = width - _AXIS
    wide = max(1, min(room // len(values), 3))
    bins = _merged(values, room // wide)

    def level(value: float) -> int:
        if not math.isfinite(value):
            return 8 * HEIGHT
        return max(1, round(8 * HEIGHT * (value - low) / (high - low)))

    rows = []
    for line in range(HEIGHT - 1, -1, -1):
        cells = [
            "x" if math.isnan(value) else _EIGHTHS[min(8, max(0, level(value) - 8 * line))]
            for value in bins
        ]
        label = {HEIGHT - 1: f"{high}", 0: f"{low}"}.get(line, "")
        rows.append(f"{label:>{_AXIS - 2}} │" + "".join(cell * wide for cell in cells))
    title = f"{record.subject.scheme}: signal to noise of hidden states, dB, by layer"
    return "\n".join([title, *rows, *_layer_axis(len(values), wide * len(bins))])


def sqnr_side_by_side(records: Sequence[EvalRecord], width: int) -> str:
    """Lines of several schemes on one scale; each has a sign of its own, named at its end."""
    series = [record.measured.sqnr_db for record in records]
    names = [record.subject.scheme for record in records]
    room = width - _AXIS - max(map(len, names)) - 1
    count = len(series[0])
    wide = max(1, min(room // count, 3))
    bins = [_merged(values, room // wide) for values in series]
    low, high = _decibel_range([value for values in series for value in values])
    room = wide * len(bins[0])
    grid = [[" "] * room for _ in range(LINES_HEIGHT)]
    ends = [""] * LINES_HEIGHT

    def line(value: float) -> int:
        if not math.isfinite(value):
            return 0 if value > 0 else LINES_HEIGHT - 1
        return round((high - value) / (high - low) * (LINES_HEIGHT - 1))

    for sign, name, values in zip(_signs(len(names)), names, bins, strict=True):
        for place, value in enumerate(values):
            grid[line(value)][place * wide + wide // 2] = "x" if math.isnan(value) else sign
        end = line(values[-1])
        ends[end] += f" {name}" if not ends[end] else f", {name}"
    labels = {0: f"{high}", LINES_HEIGHT - 1: f"{low}"}
    rows = [
        f"{labels.get(i, ''):>{_AXIS - 2}} │{''.join(cells)}{end}".rstrip()
        for i, (cells, end) in enumerate(zip(grid, ends, strict=True))
    ]
    title = "signal to noise of hidden states, dB, by layer, higher is better"
    return "\n".join([title, *rows, *_layer_axis(count, room)])


def _signs(count: int) -> list[str]:
    return [_SIGNS[i % len(_SIGNS)] for i in range(count)]


def _decibel_range(values: Sequence[float]) -> tuple[int, int]:
    """Multiples of 5 around the values, with some room below the lowest."""
    finite = [value for value in values if math.isfinite(value)]
    low = 5 * math.floor(min(finite, default=0) / 5 - 0.2)
    return low, max(5 * math.ceil(max(finite, default=0) / 5), low + 5)


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
    """At most so many values: the lowest of each run; one that is not finite wins."""
    if len(values) <= most:
        return list(values)
    edges = [i * len(values) // most for i in range(most + 1)]
    runs = [values[a:b] for a, b in pairwise(edges)]
    return [next((v for v in run if math.isnan(v)), min(run)) for run in runs]
