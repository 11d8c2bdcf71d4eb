"""Integer codes that other tools pack into 32-bit words, brought into the order of ``GroupInt``.

Codes are moved, never changed. ``along inputs`` (GPTQ): a word holds neighbours along K, and the
words form [K * bits / 32, N]. ``along outputs`` (AWQ, and everybody's zero points): a word holds
neighbours along N. Lowest bits first; words are little-endian. numpy is imported on first use.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.arrays import unsigned

if TYPE_CHECKING:
    from llmrun.quant.arrays import Unsigned

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbours along N lies in each nibble of a word, lowest nibble first."""

_ROWS = 256
"""Rows whose codes are spread out at a time."""

_TILE = 64
_PANEL = (64, 256)
"""Rows of 8 inputs and words of 8 outputs taken at a time: 8 arrays of 64 KiB and their copies."""

_SHIFTED_UP = 6
"""GPTQ's symmetric 2-bit code q weighs s * (q - 2), the 4-bit code u weighs s * (u - 8)."""


def transposed(host: HostArray) -> HostArray:
    """Return [R, C] of 8, 16 or 32 bit elements as [C, R]."""
    rows, columns = host.shape
    result = empty(host.dtype, (columns, rows))
    _transpose(unsigned(host), unsigned(result))
    return result


def codes_along_inputs(words: HostArray, bits: int, *, symmetric: bool) -> HostArray:
    """Return the codes of a weight [N, K] from I32 words [K * bits / 32, N].

    ``bits`` 4 and 8 give U8 [N, K * bits / 8], byte for byte the transposed words. ``bits`` 2 are
    widened to 4 bits, U8 [N, K / 2]; symmetric ones are moved to the middle of the 16 codes.
    """
    import numpy as np

    turned = transposed(words)
    n, per_row = turned.shape
    if bits != 2:
        return HostArray(DType.U8, (n, 4 * per_row), turned.data)
    byte = np.arange(256, dtype=np.uint16)
    pairs = [(byte >> shift) & 3 for shift in (0, 2, 4, 6)]
    first, second, third, fourth = (code + _SHIFTED_UP * symmetric for code in pairs)
    table = first | second << 4 | third << 8 | fourth << 12
    result = empty(DType.U8, (n, 8 * per_row))
    wide = np.frombuffer(result.data, "<u2")
    np.take(table.astype("<u2"), np.frombuffer(turned.data, np.uint8), out=wide, mode="clip")
    return result


def sorted_columns(groups: HostArray, group: int) -> HostArray | None:
    """The columns I32 [K] group by group, each group in the order it has in the file.

    ``groups`` I32 [K]: the group of each column. None unless all groups from 0 on have ``group``
    columns (the last perhaps fewer).
    """
    import numpy as np

    numbers = np.frombuffer(groups.data, "<i4")
    order = np.argsort(numbers, kind="stable").astype("<i4")
    whole = np.arange(len(numbers)) // (group or len(numbers))
    if not np.array_equal(numbers[order], whole):
        return None
    return HostArray(DType.I32, groups.shape, memoryview(bytearray(order.tobytes())))


def codes_in_order(codes: HostArray, bits: int, order: HostArray) -> HostArray:
    """Return codes [N, K * bits / 8] of 4 or 8 bits with column ``order[j]`` at place j."""
    import numpy as np

    columns = np.frombuffer(order.data, "<i4")
    source = np.frombuffer(codes.data, np.uint8).reshape(codes.shape)
    result = empty(codes.dtype, codes.shape)
    target = np.frombuffer(result.data, np.uint8).reshape(codes.shape)
    for top in range(0, len(source), _ROWS):
        rows = slice(top, top + _ROWS)
        if bits == 8:
            np.take(source[rows], columns, axis=1, out=target[rows])
            continue
        spread = np.stack((source[rows] & 15, source[rows] >> 4), axis=-1)
        picked = spread.reshape(len(spread), -1)[:, columns]
        target[rows] = picked[:, ::2] | picked[:, 1::2] << 4
    return result


def codes_along_outputs(words: HostArray, order: Sequence[int] = AWQ_ORDER) -> HostArray:
    """Return the 4-bit codes U8 [N, K / 2] of a weight from I32 words [K, N / 8]; 8 divides K."""
    k, groups = words.shape
    result = empty(DType.U8, (8 * groups, k // 2))
    source = unsigned(words).reshape(k // 8, 8, groups)
    target = unsigned(HostArray(DType.I32, (8 * groups, k // 8), result.data))
    target = target.reshape(groups, 8, k // 8)
    for top in range(0, k // 8, _PANEL[0]):
        for left in range(0, groups, _PANEL[1]):
            down, across = slice(top, top + _PANEL[0]), slice(left, left + _PANEL[1])
            columns = _nibbles_transposed([source[down, row, across] for row in range(8)])
            for place, column in zip(order, columns, strict=True):
                _transpose(column, target[across, place, down])
    return result


def zero_points(
    words: HostArray, bits: int, order: Sequence[int] = IN_ORDER, *, less_one: str = ""
) -> HostArray:
    """Return the zero points U8 [N, G] from I32 words [G, N * bits / 32].

    ``less_one``: what 1 was taken off before they were stored: nothing, each ``field`` by itself,
    or the whole ``word``, where a zero point of 0 borrows from the one above it.
    """
    import numpy as np

    stored = unsigned(words)
    if less_one == "word":
        stored = stored + np.uint32((2**32 - 1) // (2**bits - 1))
    fields = np.empty((*stored.shape, 32 // bits), np.uint8)
    places = order if bits == 4 else range(32 // bits)
    for position, place in enumerate(places):
        value = (stored >> np.uint32(bits * position)) + np.uint32(less_one == "field")
        fields[:, :, place] = value & np.uint32(2**bits - 1)
    result = empty(DType.U8, (words.shape[1] * 32 // bits, words.shape[0]))
    unsigned(result)[...] = fields.reshape(words.shape[0], -1).T
    return result


def _transpose(source: "Unsigned", target: "Unsigned") -> None:
    """Write source [R, C] to target [C, R], tile by tile: both stay in the nearest cache."""
    rows, columns = source.shape
    for row in range(0, rows, _TILE):
        for column in range(0, columns, _TILE):
            tile = source[row : row + _TILE, column : column + _TILE]
            target[column : column + _TILE, row : row + _TILE] = tile.T


def _nibbles_transposed(rows: "list[Unsigned]") -> "list[Unsigned]":
    """Of 8 rows of words with 8 nibbles: nibble r of result p is nibble p of row r."""
    import numpy as np

    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        low, shift = np.uint32(mask), np.uint32(4 * distance)
        swapped = list(rows)
        for upper in range(8):
            if upper & distance:
                continue
            one, other = rows[upper], rows[upper + distance]
            swapped[upper] = (one & low) | ((other & low) << shift)
            swapped[upper + distance] = ((one >> shift) & low) | (other & ~low)
        rows = swapped
    return rows
