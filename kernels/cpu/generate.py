"""Writes *_avx2.inc: the AVX2 matrix kernels as GNU extended assembly.

    python -m llmrun.kernels.cpu.generate kernels/cpu

One function holds one asm block, a loop over the columns of one tile of tokens; the compiler
passes the operands (fields of `Walk`, see matmul_tiles.h), so the same text serves every calling
convention. Not intrinsics: compilers spill here, and gcc 12 reaches two thirds of this speed.
matmul_avx2.cpp includes each file once per type of scales, with three macros defined: LOAD(at, reg)
converts 8 scales in memory to fp32, ROW is the bytes of 16 scales and HALF of 8.

All kinds of weight have one shape. A block is 256 bytes of a panel, 4 steps of 64: 16 rows with 4
bytes each. One load takes 8 rows (half a panel) of a step, which fall into two parts:

    W4   low nibbles  k = 8j .. 8j+3      high nibbles  k = 8j+4 .. 8j+7     32 columns a block
    W8   even bytes   k = 4j, 4j+2        odd bytes     k = 4j+1, 4j+3       16 columns a block

Beside each part lie 4 bytes of activations (4 int8, or 2 int16 in the same order), 32 bytes a block
and token. They are broadcast to all rows and multiplied by vpmaddubsw or vpmaddwd. W4 adds up in
int16: 8 sums of two products are at most 8 * 2 * 15 * 127 = 30480.

LUT8 looks its levels up, which vpmaddubsw wants unsigned. There are two kinds:

    small   all levels are -16..16: 16 is added, and they are multiplied like codes of W4, for 16
            products of them still fit int16 (16 * 16 * 127 = 32512)
    levels  128 is added, and the upper and the lower half of each byte are looked up apart: two
            codes of W4, of which the first weighs 16 times as much. Half a panel at a time

What is added comes off at the start of the sums, like W4's 8.
"""

import sys
from pathlib import Path

from llmrun.kernels.cpu.assembly import OWN, SHARED

# Tokens of a tile, 16 rows beside each: ymm0..9 hold their sums. 8 rows beside 10 tokens load every
# activation twice as often and are 7 % slower at 2 to 5 tokens, and no faster at 10.
WIDEST = 5

# Up to so many tokens weights come from memory, and are fetched so many bytes ahead: the hardware
# alone does not keep the memory busy beside this much arithmetic. A wider tile is one of many that
# pass the same weights.
FEW = 4
AHEAD = 2048

MINIMA = {"w4": ("", "mins", "zeros"), "w8": ("", "mins", "zeros"), "small": ("",), "levels": ("",)}
"""Ways to store minima that each kind has kernels for."""

Words = list[str]  # macros of one line of the file
Parts = tuple[list[Words], list[Words], list[Words]]  # start, block, fold


def gemm_parts(kind: str, tokens: int, minima: str) -> Parts:
    """A panel beside `tokens` tokens. fp32 sums stay in L1, [tokens][16]."""
    pairs = [(2 * t, 2 * t + 1) for t in range(tokens)]  # sums of the token's two halves
    if minima:
        start = [[f"CLEAR({s})" for pair in pairs for s in pair]]
    else:
        start = [[]]
        for t, (a, b) in enumerate(pairs):
            twice = f"TWICE({a}) " if kind == "small" else ""
            start[0].append(f"START({4 * t}, {a}) {twice}COPY({a}, {b})")
    block = []
    for j in range(4):
        if tokens <= FEW:
            block.append([f'AHEAD_OF("{AHEAD + 64 * j}(%[w])")'])
        for part, offset in (("FIRST", 0), ("SECOND", 4)):
            block.append([f'{part}("{64 * j}(%[w])", 10)', f'{part}("{64 * j + 32}(%[w])", 11)'])
            for t, (a, b) in enumerate(pairs):
                at = 32 * t + 8 * j + offset
                block[-1].append(f"ACTS({at}, 12) DOT_ROWS({a}, {b})")
    fold = []
    for half, base in enumerate(("", "%c[half]")):
        fold.append([f'LOAD("{base}(%[ws])", 10)'])
        if kind == "small":
            fold[-1].append("TIMES_UNIT")
        if minima == "mins":
            fold[-1].append(f'LOAD("{base}(%[wm])", 11)')
        if minima == "zeros":
            fold[-1].append(f'LOAD_ZEROS("{8 * half}(%[wm])")')
        for t, pair in enumerate(pairs):
            s = pair[half]
            minimum = {"": [], "mins": ["ADD_MIN"], "zeros": ["TAKE_ZERO"]}[minima]
            fold.append(
                [
                    f"FOLD({4 * t}, {s}, {32 * s})",
                    *(f"{name}({4 * t}, {s})" for name in minimum),
                    f"STORE({s}, {32 * s})",
                ]
            )
    return start, block, fold


def gemv_parts(kind: str, panels: int, minima: str) -> Parts:
    """Whole panels beside one token. fp32 sums stay in registers 0..3.

    Both halves of a panel are taken together: they share its cache lines.
    """
    halves = range(2 * panels)
    dots = [len(halves) + h for h in halves]
    base = ["(%[w])", "(%[w],%[w_panel])"]
    scales = ["(%[ws])", "%c[half](%[ws])", "(%[ws],%[s_panel])", "%c[half](%[ws],%[s_panel])"]
    zeros = ["(%[wm])", "8(%[wm])", "(%[wm],%[m_panel])", "8(%[wm],%[m_panel])"]

    first = f"CLEAR({dots[0]})" if minima else f"START(0, {dots[0]})"
    start = [[first, *(f"COPY({dots[0]}, {d})" for d in dots[1:])]]
    if kind == "small":
        start[0].insert(1, f"TWICE({dots[0]})")
    block = []
    for j in range(4):
        block.append([f'AHEAD_OF("{AHEAD + 64 * j}{base[p]}")' for p in range(panels)])
        block.append([f"ACTS({8 * j}, 12)", f"ACTS({8 * j + 4}, 13)"])
        for h in halves:
            block.append(
                [f'BOTH("{64 * j + 32 * (h % 2)}{base[h // 2]}")', f"DOT_PARTS({dots[h]})"]
            )
    fold = [["TOKEN_SCALE", *(["TOKEN_SUM"] if minima else [])]]
    for h in halves:
        fold.append([f'LOAD("{scales[h]}", 10)'])
        if kind == "small":
            fold[-1].append("TIMES_UNIT")
        if minima == "zeros":
            fold[-1].append(f'LOAD_ZEROS("{zeros[h]}")')
        fold[-1].append(f"FOLD_HERE({dots[h]}, {h})")
        if minima == "mins":
            fold[-1] += [f'LOAD("{scales[h].replace("ws", "wm")}", 11)', f"ADD_MIN_HERE({h})"]
        if minima == "zeros":
            fold[-1].append(f"TAKE_ZERO_HERE({h})")
    return start, block, fold


def halves_gemm_parts(tokens: int) -> Parts:
    """Half a panel of "levels" beside `tokens` tokens: sums of lower and of upper halves."""
    pairs = [(2 * t, 2 * t + 1) for t in range(tokens)]
    start = [[f"CLEAR({low}) START({4 * t}, {up})" for t, (low, up) in enumerate(pairs)]]
    block = []
    for j in range(4):
        if tokens <= FEW:
            block.append([f'AHEAD_OF("{AHEAD + 64 * j}(%[w])")'])
        for part, offset in (("FIRST", 0), ("SECOND", 4)):
            block.append([f'{part}("{64 * j}(%[w])", 10)', "HALVES(10, 11)"])
            for t, (low, up) in enumerate(pairs):
                block[-1].append(f"ACTS({32 * t + 8 * j + offset}, 12) DOT_ROWS({low}, {up})")
    fold = [['LOAD("(%[ws])", 10)', "TIMES_UNIT"]]
    for t, (low, up) in enumerate(pairs):
        at = 64 * t
        fold.append([f"JOIN({low}, {up})", f"FOLD({4 * t}, {low}, {at})", f"STORE({low}, {at})"])
    return start, block, fold


def halves_gemv_parts() -> Parts:
    """A panel of "levels" beside one token: fp32 sums in registers 0 and 1, others in 2..5."""
    pairs = [(2, 3), (4, 5)]
    start = [["CLEAR(2)", "CLEAR(4)", "START(0, 3)", "COPY(3, 5)"]]
    block = []
    for j in range(4):
        block.append([f'AHEAD_OF("{AHEAD + 64 * j}(%[w])")'])
        block.append([f"ACTS({8 * j}, 12)", f"ACTS({8 * j + 4}, 13)"])
        for h, (low, up) in enumerate(pairs):
            block.append([f'BOTH("{64 * j + 32 * h}(%[w])")', f"DOT_HALVES({low}, {up})"])
    fold = [["TOKEN_SCALE"]]
    for h, (low, up) in enumerate(pairs):
        at = "%c[half](%[ws])" if h else "(%[ws])"
        fold.append([f'LOAD("{at}", 10)', "TIMES_UNIT", f"JOIN({low}, {up})"])
        fold[-1].append(f"FOLD_HERE({low}, {h})")
    return start, block, fold


def loops(kind: str, minima: str, parts: Parts) -> list[Words]:
    """The parts inside their loops. W8's blocks stay rolled: unrolling a group halves the speed."""
    start, block, fold = parts
    block = [*block, ["NEXT_BLOCK"]]
    if kind == "w8":
        block = [["BLOCKS"], *block[:-1], ["NEXT_BLOCK", "END_BLOCKS"]]
    next_minima = {"": [], "mins": ["NEXT_SCALES(wm)"], "zeros": ["NEXT_ZEROS"]}[minima]
    return [
        ["WEIGHT_GROUPS", "ACTIVATION_GROUPS"],
        *start,
        *block,
        *fold,
        [f"END_ACTIVATION_GROUPS({'sum' if minima else 'init'})"],
        ["NEXT_SCALES(ws)", *next_minima, "END_WEIGHT_GROUPS"],
    ]


def wrap(words: Words) -> str:
    """Words in lines of at most 110 columns."""
    lines = [" " * 6 + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > 110:
            lines.append(" " * 10 + word)
        else:
            lines[-1] += " " + word
    return "\n".join(lines)


def operands(*items: str) -> str:
    """One list of operands of an asm statement."""
    first, *rest = items
    words = [f": {first}", *rest]
    return wrap([f"{word}," for word in words[:-1]] + words[-1:])


CONSTANTS = {
    "small": ('[levels] "m"(a.levels)', '[mask] "m"(MASKS)', '[ones] "m"(ONES)'),
    "levels": (
        '[upper] "m"(a.levels)',
        '[lower] "m"(a.lower)',
        '[mask] "m"(MASKS)',
        '[ones] "m"(ONES)',
        '[sixteens] "m"(SIXTEENS)',
    ),
}
"""Operands in memory of the kinds that look up."""


def function(name: str, kind: str, minima: str, panels: int, body: list[Words]) -> str:
    """One kernel: the body with its operands, which are fields of the Walk it is given."""
    moving = ["w", "x", "scale", "ws", *(["sum", "wm"] if minima else ["init"])]
    fixed = ["x_step", "step", "acc", *(["w_panel", "s_panel"] if panels else [])]
    counts = ["inner", *(["blocks"] if kind == "w8" else [])]  # in memory: registers are short
    if panels and minima == "zeros":
        fixed[1] = "m_panel"
        counts.append("step")
    scratch = ["i", *(["b"] if kind == "w8" else [])]
    outputs = [f'[{m}] "+r"(a.{m})' for m in moving]
    outputs += ['[outer] "+m"(a.outer)', *(f'[{s}] "=&r"({s})' for s in scratch)]
    inputs = [f'[{f}] "r"(a.{f})' for f in fixed] + [f'[{c}] "m"(a.{c})' for c in counts]
    if kind in CONSTANTS:
        inputs += [*CONSTANTS[kind], '[unit] "m"(a.unit)']
    lines = [
        f"void {name}(Walk a) {{",
        f"  int64_t {', '.join(scratch)};",
        "  __asm__ volatile(",
        *(wrap(words) for words in body),
        operands(*outputs),
        operands(*inputs, '[row] "i"(ROW)', '[half] "i"(HALF)'),
        operands('"memory"', '"cc"', *(f'"ymm{n}"' for n in range(16))) + ");",
        "}",
        "",
    ]
    return "\n".join(lines)


def kernels(kind: str, minima: str) -> tuple[list[str], str]:
    """All kernels of a kind with one sort of minima, and their entry of its table."""
    functions, names = [], []
    suffix = f"_{minima}" if minima else ""
    for tokens in range(2, WIDEST + 1):
        halves = kind == "levels"
        name = f"{kind}_gemm_{tokens}{suffix}"
        parts = halves_gemm_parts(tokens) if halves else gemm_parts(kind, tokens, minima)
        body = [["CONSTANTS"], *loops(kind, minima, parts)]
        functions.append(function(name, kind, minima, 0, body))
        names.append(f"both_halves<{name}, HALF>" if halves else name)
    for panels in (1,) if kind == "levels" else (1, 2):
        names.append(f"{kind}_gemv_{panels}{suffix}")
        parts = halves_gemv_parts() if kind == "levels" else gemv_parts(kind, panels, minima)
        fetch = [f"FETCH({32 * h}, {h})" for h in range(2 * panels)]
        store = [f"STORE({h}, {32 * h})" for h in range(2 * panels)]
        body = [["CONSTANTS"], fetch, *loops(kind, minima, parts), store]
        functions.append(function(names[-1], kind, minima, panels, body))
    gemm, gemv = ", ".join(names[: WIDEST - 1]), ", ".join(names[WIDEST - 1 :])
    return functions, wrap_entry(gemm, gemv)


def wrap_entry(gemm: str, gemv: str) -> str:
    """One entry of a table."""
    return f"    {{{{nullptr, nullptr, {gemm}}},\n     {{nullptr, {gemv}}}}}"


def render(kind: str) -> str:
    """The file of one kind."""
    macros = OWN[kind].lstrip("\n") + SHARED
    made = [kernels(kind, minima) for minima in MINIMA[kind]]
    defined = [line.split()[1].split("(")[0] for line in macros.splitlines() if "#define" in line]
    return "\n".join(
        [
            "// Written by generate.py, which explains it. Do not edit.",
            macros,
            "// <kind>_gemm_<tokens>: one panel. <kind>_gemv_<panels>: one token.",
            *(text for functions, _ in made for text in functions),
            f"constexpr Table {kind}[{len(made)}] = {{  // minima: none, typed, zero points",
            ",\n".join(entry for _, entry in made) + "};",
            "",
            *(f"#undef {name}" for name in defined),
            "",
        ]
    )


def main(folder: Path) -> None:
    """Writes all files into `folder`."""
    for kind in OWN:
        (folder / f"{kind}_avx2.inc").write_text(render(kind), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
