"""Taking packed words apart inside kernels: codes as pairs of bf16 numbers, without conversions.

Each function takes int32 words [rows, 16] and gives two columns per word, left and right, that are
neighbours along K. Interpreted, it is the plain twin (in fp32) of each piece of inline assembly.
The trick: 0x4300 is 128 in bf16, whose last seven bits count ones; or-ed with a code of at most
seven bits it is 128 + code, for two codes per instruction.
"""

import triton
import triton.language as tl

from llmrun.kernels.gpu.mode import interpreted
from llmrun.kernels.gpu.rounding import to_bf16

INTERPRETED = tl.constexpr(interpreted())

W4_ASM = tl.constexpr(
    """{
    .reg .b32 t, one, offset;
    mov.b32 one, 0x3f803f80;
    mov.b32 offset, 0xc308c308;
    lop3.b32 t, $2, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 t, t, one, offset;
    mov.b32 {$0, $1}, t;
    }"""
)
"""(128 + u) - 136 = u - 8."""

W4_FROM_ZERO_ASM = tl.constexpr(
    """{
    .reg .b32 t, one, offset;
    mov.b32 one, 0x3f803f80;
    mov.b32 offset, 0xc300c300;
    lop3.b32 t, $2, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 t, t, one, offset;
    mov.b32 {$0, $1}, t;
    }"""
)
"""(128 + u) - 128 = u. (A text of its own: with the offset as an argument, the assembler of cc 80
makes the constants anew for each pair.)"""

W8_ASM = tl.constexpr(
    """{
    .reg .b32 t, one, offset;
    mov.b32 one, 0x3f803f80;
    lop3.b32 t, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 offset, $2, 0x00800080, 0xc380c380, 0x6a;
    fma.rn.bf16x2 t, t, one, offset;
    mov.b32 {$0, $1}, t;
    }"""
)
"""u - 128: (128 + the low seven bits of u) minus 256, or minus 128 if the eighth is set, which
flips the last bit of the exponent of 0xc380 = -256."""

CHOICE_ASM = tl.constexpr(
    """{
    .reg .b32 t;
    shr.u32 t, $1, 1;
    lop3.b32 $0, t, 0x44444444, 0x32103210, 0xea;
    }"""
)
"""For each nibble its place among four, plus 4 if its highest bit is set."""

BYTES_ASM = tl.constexpr(
    """{
    .reg .b32 a, b;
    prmt.b32 a, $3, $4, $1;
    prmt.b32 b, $5, $6, $1;
    prmt.b32 $0, a, b, $2;
    }"""
)
"""One byte of each of four values: a byte permute looks four 3-bit indices up in eight bytes, so
the lower half of the table, the upper half, and a choice by the fourth bit."""

ONES_ASM = tl.constexpr("{ .reg .b32 t; mov.b32 t, 0x3f803f80; mov.b32 {$0, $1}, t; }")

PAIR_ASM = tl.constexpr("{ .reg .b32 t; prmt.b32 t, $2, $3, $4; mov.b32 {$0, $1}, t; }")
"""Low and high bytes as two bf16."""


@triton.jit
def w4_pair(words, J: tl.constexpr, MIDDLE: tl.constexpr):
    """Columns 32 J + 2 i and the next of ``w4`` words i: u - ``MIDDLE``, which is 8 or 0."""
    if INTERPRETED:
        left = ((words >> (4 * J)) & 15) - MIDDLE
        right = ((words >> (4 * J + 16)) & 15) - MIDDLE
        return left.to(tl.float32), right.to(tl.float32)
    return tl.inline_asm_elementwise(
        W4_ASM if MIDDLE == 8 else W4_FROM_ZERO_ASM,
        "=h,=h,r",
        [words >> (4 * J)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def w8_pair(words, J: tl.constexpr):
    """Columns 32 J + 2 i and the next of ``w8`` words i: u - 128."""
    if INTERPRETED:
        left = ((words >> (8 * J)) & 255) - 128
        right = ((words >> (8 * J + 16)) & 255) - 128
        return left.to(tl.float32), right.to(tl.float32)
    return tl.inline_asm_elementwise(
        W8_ASM,
        "=h,=h,r",
        [words >> (8 * J)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def lut_value(words, table, P: tl.constexpr):
    """The plain twin of a look-up: nibble P of each word, rounded to bf16, in fp32."""
    return to_bf16(tl.load(table + ((words >> (4 * P)) & 15))).to(tl.float32)


@triton.jit
def lut_pair(words, table, J: tl.constexpr):
    """Columns 32 J + 2 i and the next of ``lut`` words i: table values, rounded to bf16.

    ``table``: fp32 [24] as ``layout.table_words`` makes it. What pairs of one word have in common
    is written once for each and computed once for all.
    """
    if INTERPRETED:
        return lut_value(words, table, 2 * J), lut_value(words, table, 2 * J + 1)
    packed = (table + 16).to(tl.pointer_type(tl.int32))
    choice = tl.inline_asm_elementwise(
        CHOICE_ASM, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
    )
    index = (words & 0x77777777) >> (16 * (J // 2))
    choice = choice >> (16 * (J // 2))
    high = lut_bytes(index, choice, packed)
    low = lut_bytes(index, choice, packed + 4)
    return tl.inline_asm_elementwise(
        PAIR_ASM,
        "=h,=h,r,r,r",
        [low, high, 0x5140 if J % 2 == 0 else 0x7362],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def lut_bytes(index, choice, packed):
    """One byte of the four values whose indices stand in the low half of each word."""
    zero = tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
    return tl.inline_asm_elementwise(
        BYTES_ASM,
        "=r,r,r,r,r,r,r",
        [
            index,
            choice,
            tl.load(packed + zero),
            tl.load(packed + zero + 1),
            tl.load(packed + zero + 2),
            tl.load(packed + zero + 3),
        ],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def ones_like(words):
    """Ones in the place of the columns of half the rows of words [64, 16]: [32, 32].

    Made of words, so that the compiler lays them out as what is multiplied beside them.
    """
    rows = tl.split(tl.permute(tl.reshape(words, (2, 32, words.shape[1])), (1, 2, 0)))
    if INTERPRETED:
        return woven(rows[0] * 0 + 1.0, rows[0] * 0 + 1.0)
    left, right = tl.inline_asm_elementwise(
        ONES_ASM,
        "=h,=h,r",
        [rows[0]],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )
    return woven(left, right)


@triton.jit
def woven(left, right):
    """[rows, 16] each as [rows, 32], neighbours side by side."""
    return tl.reshape(tl.join(left, right), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def halved(words):
    """The first and the second eight of [rows, 16] words: the two groups of 16 columns."""
    split = tl.permute(tl.reshape(words, (words.shape[0], 2, 8)), (0, 2, 1))
    return tl.split(split)


@triton.jit
def group_values(pairs, KIND: tl.constexpr):
    """Scales or minima of 64 rows in fp32, in the order of the rows.

    ``pairs``: pointer to them as ``layout.pack_groups`` has them, two in a word: int32 for 16-bit
    ones (``KIND``: bf16 or f16), int64 for f32.
    """
    words = tl.load(pairs + tl.arange(0, 32))
    if KIND == "f32":
        low = words.to(tl.int32).to(tl.float32, bitcast=True)
        high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif KIND == "bf16":
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    blocks = tl.reshape(tl.join(low, high), (4, 8, 2))
    return tl.reshape(tl.permute(blocks, (0, 2, 1)), (64,))


@triton.jit
def halves_of(x, BM: tl.constexpr):
    """The first and the second 16 rows of x [32, BM]."""
    return tl.split(tl.permute(tl.reshape(x, (2, 16, BM)), (1, 2, 0)))
