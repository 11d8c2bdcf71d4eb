"""The inline assembly that takes words apart, run by a small emulator on many words.

Interpreted kernels use plain twins of it, so the texts themselves are tried here.
"""

import random
import re
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmrun.kernels.gpu import layout, words

MASK = 0xFFFFFFFF


def bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def bf16_bits(value: float) -> int:
    """The bits of a number that bf16 holds exactly (else the test is wrong)."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    assert bits & 0xFFFF == 0, value
    return bits >> 16


def lop3(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for bit in range(32):
        place = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        result |= (table >> place & 1) << bit
    return result


def prmt(a: int, b: int, selector: int) -> int:
    octets = (a | b << 32).to_bytes(8, "little")
    result = 0
    for place in range(4):
        chosen = selector >> 4 * place & 15
        assert chosen < 8  # the eighth bit would repeat a sign
        result |= octets[chosen] << 8 * place
    return result


def fma_bf16x2(a: int, b: int, c: int) -> int:
    halves = [
        bf16_bits(bf16(a >> s & 0xFFFF) * bf16(b >> s & 0xFFFF) + bf16(c >> s & 0xFFFF))
        for s in (0, 16)
    ]
    return halves[0] | halves[1] << 16


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "fma.rn.bf16x2": fma_bf16x2,
}


def run(text: str, arguments: dict[int, int]) -> dict[int, int]:
    """Execute a text; arguments and results by their numbers, 32 or (a pair's) 16 bits wide."""
    registers = {f"${number}": value & MASK for number, value in arguments.items()}
    results: dict[int, int] = {}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for statement in text.strip().strip("{}").split(";"):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        opcode, operands = statement.split(None, 1)
        if pair := re.fullmatch(r"\{\$(\d+), \$(\d+)\}, (\w+)", operands):
            whole = value(pair[3])
            results[int(pair[1])], results[int(pair[2])] = whole & 0xFFFF, whole >> 16
            continue
        target, *sources = [operand.strip() for operand in operands.split(",")]
        registers[target] = OPERATIONS[opcode](*map(value, sources)) & MASK
        if target.startswith("$"):
            results[int(target[1:])] = registers[target]
    return results


def some_words() -> list[int]:
    made = random.Random(0)
    return [0, MASK, 0x01234567, 0x89ABCDEF, *(made.getrandbits(32) for _ in range(500))]


@pytest.mark.parametrize(
    ("text", "middle"), [(words.W4_ASM, 8), (words.W4_FROM_ZERO_ASM, 0)], ids=["middle", "zero"]
)
def test_four_bit_pairs(text: Any, middle: int) -> None:
    for word in some_words():
        found = run(text.value, {2: word})
        assert bf16(found[0]) == (word & 15) - middle
        assert bf16(found[1]) == (word >> 16 & 15) - middle


def test_eight_bit_pairs() -> None:
    for word in [u | (255 - u) << 16 for u in range(256)] + some_words():
        found = run(words.W8_ASM.value, {2: word})
        assert bf16(found[0]) == (word & 255) - 128
        assert bf16(found[1]) == (word >> 16 & 255) - 128


def test_look_ups_in_a_table() -> None:
    table = torch.randn(16, generator=torch.Generator().manual_seed(0))
    bits = [value & 0xFFFF for value in table.bfloat16().view(torch.int16).tolist()]
    packed = layout.table_words(table)[16:].contiguous().view(torch.int32).tolist()
    high, low = packed[:4], packed[4:]
    for word in some_words():
        choice = run(words.CHOICE_ASM.value, {1: word})[0]
        for j in range(4):
            index, chosen = (word & 0x77777777) >> 16 * (j // 2), choice >> 16 * (j // 2)
            halves = [
                run(
                    words.BYTES_ASM.value,
                    {1: index & 0xFFFF, 2: chosen & 0xFFFF, **dict(enumerate(quarter, 3))},
                )[0]
                for quarter in (low, high)
            ]
            selector = 0x5140 if j % 2 == 0 else 0x7362
            found = run(words.PAIR_ASM.value, {2: halves[0], 3: halves[1], 4: selector})
            for e in range(2):
                assert found[e] == bits[word >> 8 * j + 4 * e & 15]


def test_ones() -> None:
    found = run(words.ONES_ASM.value, {2: 12345})
    assert [bf16(found[0]), bf16(found[1])] == [1.0, 1.0]
