"""Macros of the AVX2 matrix kernels that generate.py writes, which explains them.

``SHARED`` are those of all kinds, ``OWN`` those of each; a file gets its own and the shared ones.
"""

# Registers: 0..9 sums, 10 and 11 weights (later scales and minima), 12 and 13 activations and
# products, 14 selects the first part of the weights, 15 holds ones in int16. Of "small" 15 holds
# the levels, of "levels" 14 their upper and 15 their lower halves; constants are in memory then.
SHARED = r"""
#define START(at, sum) "vpbroadcastd " #at "(%[init]), %%ymm" #sum "\n\t"
#define CLEAR(sum) "vpxor %%ymm" #sum ", %%ymm" #sum ", %%ymm" #sum "\n\t"
#define COPY(from, to) "vmovdqa %%ymm" #from ", %%ymm" #to "\n\t"
#define FIRST(at, reg) MASKED(at, reg) LOOK_UP(reg)
#define SECOND(at, reg) "vmovdqu " at ", %%ymm" #reg "\n\t" SHIFTED(reg, reg) LOOK_UP(reg)
#define AHEAD_OF(at) "prefetcht0 " at "\n\t"
#define BOTH(at) "vmovdqu " at ", %%ymm10\n\t" SHIFTED(10, 11) \
    "vpand " MASK ", %%ymm10, %%ymm10\n\t" LOOK_UP(10) LOOK_UP(11)
#define ACTS(at, reg) "vpbroadcastd " #at "(%[x]), %%ymm" #reg "\n\t"
// One part of 16 rows in 10 and 11: sums += weights * the activations in 12
#define DOT_ROWS(sum, sum2) MULTIPLY " %%ymm12, %%ymm10, %%ymm13\n\t" \
    MULTIPLY " %%ymm12, %%ymm11, %%ymm12\n\t" ADD_TO(13, sum) ADD_TO(12, sum2)
// Both parts of 8 rows in 10 and 11: sum += weights * the activations in 12 and 13
#define DOT_PARTS(sum) MULTIPLY " %%ymm12, %%ymm10, %%ymm10\n\t" ADD_TO(10, sum) \
    MULTIPLY " %%ymm13, %%ymm11, %%ymm11\n\t" ADD_TO(11, sum)
#define ADD_TO(product, sum) ADD " %%ymm" #product ", %%ymm" #sum ", %%ymm" #sum "\n\t"
// acc = fma(dot, ws * as, acc), with mins then acc = fma(m, sum, acc). In L1; still to be stored
#define FOLD(at, sum, acc) TO_FLOAT(sum) "vbroadcastss " #at "(%[scale]), %%ymm12\n\t" \
    "vmulps %%ymm10, %%ymm12, %%ymm12\n\tvfmadd213ps " #acc "(%[acc]), %%ymm12, %%ymm" #sum "\n\t"
#define ADD_MIN(at, sum) "vbroadcastss " #at "(%[sum]), %%ymm12\n\t" \
    "vfmadd231ps %%ymm12, %%ymm11, %%ymm" #sum "\n\t"
// The same for zero points: with the scales in 10, 11 is -m
#define LOAD_ZEROS(at) "vpmovzxbd " at ", %%ymm11\n\tvcvtdq2ps %%ymm11, %%ymm11\n\t" \
    "vmulps %%ymm10, %%ymm11, %%ymm11\n\t"
#define TAKE_ZERO(at, sum) "vbroadcastss " #at "(%[sum]), %%ymm12\n\t" \
    "vfnmadd231ps %%ymm12, %%ymm11, %%ymm" #sum "\n\t"
// Scales in 10 times the unit of levels
#define TIMES_UNIT "vbroadcastss %[unit], %%ymm11\n\tvmulps %%ymm11, %%ymm10, %%ymm10\n\t"
#define STORE(sum, acc) "vmovups %%ymm" #sum ", " #acc "(%[acc])\n\t"
#define FETCH(acc, sum) "vmovups " #acc "(%[acc]), %%ymm" #sum "\n\t"
// The same in registers, with the token's scale in 12 and sum in 13
#define TOKEN_SCALE "vbroadcastss (%[scale]), %%ymm12\n\t"
#define TOKEN_SUM "vbroadcastss (%[sum]), %%ymm13\n\t"
#define FOLD_HERE(sum, acc) TO_FLOAT(sum) "vmulps %%ymm10, %%ymm12, %%ymm10\n\t" \
    "vfmadd231ps %%ymm10, %%ymm" #sum ", %%ymm" #acc "\n\t"
#define ADD_MIN_HERE(acc) "vfmadd231ps %%ymm11, %%ymm13, %%ymm" #acc "\n\t"
#define TAKE_ZERO_HERE(acc) "vfnmadd231ps %%ymm11, %%ymm13, %%ymm" #acc "\n\t"
// Loops over weight groups (1), activation groups of each (2) and blocks of each (3)
#define WEIGHT_GROUPS "1: movq %[inner], %[i]\n\t.p2align 6\n\t"
#define ACTIVATION_GROUPS "2:\n\t"
#define BLOCKS "movq %[blocks], %[b]\n\t.p2align 5\n\t3:\n\t"
#define NEXT_BLOCK "addq $256, %[w]\n\taddq %[x_step], %[x]\n\t"
#define END_BLOCKS "decq %[b]\n\tjnz 3b\n\t"
#define END_ACTIVATION_GROUPS(start) "addq %[step], %[scale]\n\taddq %[step], %[" #start "]\n\t" \
    "decq %[i]\n\tjnz 2b\n\t"
#define NEXT_SCALES(scales) "addq %[row], %[" #scales "]\n\t"
#define NEXT_ZEROS "addq $16, %[wm]\n\t"
#define END_WEIGHT_GROUPS "decq %[outer]\n\tjnz 1b\n\t"
"""

# Nibbles: the shift is one of 16 bits, so the upper byte's low nibble comes along and is masked.
NIBBLES = r"""
#define SHIFTED(from, to) "vpsrlw $4, %%ymm" #from ", %%ymm" #to "\n\t" \
    "vpand " MASK ", %%ymm" #to ", %%ymm" #to "\n\t"
#define MULTIPLY "vpmaddubsw"
#define ADD "vpaddw"
"""

OWN = {
    "w4": r"""
#define CONSTANTS \
    "movl $0x0f0f0f0f, %k[i]\n\tvmovd %k[i], %%xmm14\n\tvpbroadcastd %%xmm14, %%ymm14\n\t" \
    "movl $0x00010001, %k[i]\n\tvmovd %k[i], %%xmm15\n\tvpbroadcastd %%xmm15, %%ymm15\n\t"
#define MASK "%%ymm14"
#define MASKED(at, reg) "vpand " at ", %%ymm14, %%ymm" #reg "\n\t"
#define LOOK_UP(reg)
#define TO_FLOAT(sum) "vpmaddwd %%ymm15, %%ymm" #sum ", %%ymm" #sum "\n\t" \
    "vcvtdq2ps %%ymm" #sum ", %%ymm" #sum "\n\t"
"""
    + NIBBLES.lstrip("\n"),
    "w8": r"""
#define CONSTANTS \
    "movl $0x00ff00ff, %k[i]\n\tvmovd %k[i], %%xmm14\n\tvpbroadcastd %%xmm14, %%ymm14\n\t"
#define MASK "%%ymm14"
#define MASKED(at, reg) "vpand " at ", %%ymm14, %%ymm" #reg "\n\t"
#define LOOK_UP(reg)
#define SHIFTED(from, to) "vpsrlw $8, %%ymm" #from ", %%ymm" #to "\n\t"
#define MULTIPLY "vpmaddwd"
#define ADD "vpaddd"
#define TO_FLOAT(sum) "vcvtdq2ps %%ymm" #sum ", %%ymm" #sum "\n\t"
""",
    "small": r"""
#define CONSTANTS "vmovdqu %[mask], %%ymm14\n\tvbroadcasti128 %[levels], %%ymm15\n\t"
#define MASK "%%ymm14"
#define MASKED(at, reg) "vpand " at ", %%ymm14, %%ymm" #reg "\n\t"
#define LOOK_UP(reg) "vpshufb %%ymm" #reg ", %%ymm15, %%ymm" #reg "\n\t"
#define TWICE(sum) "vpaddw %%ymm" #sum ", %%ymm" #sum ", %%ymm" #sum "\n\t"
#define TO_FLOAT(sum) "vpmaddwd %[ones], %%ymm" #sum ", %%ymm" #sum "\n\t" \
    "vcvtdq2ps %%ymm" #sum ", %%ymm" #sum "\n\t"
"""
    + NIBBLES.lstrip("\n"),
    "levels": r"""
#define CONSTANTS "vbroadcasti128 %[upper], %%ymm14\n\tvbroadcasti128 %[lower], %%ymm15\n\t"
#define MASK "%[mask]"
#define MASKED(at, reg) "vmovdqu " at ", %%ymm" #reg "\n\t" \
    "vpand %[mask], %%ymm" #reg ", %%ymm" #reg "\n\t"
#define LOOK_UP(reg)
// Codes in `reg`: their upper halves to `up`, their lower ones to themselves
#define HALVES(reg, up) "vpshufb %%ymm" #reg ", %%ymm14, %%ymm" #up "\n\t" \
    "vpshufb %%ymm" #reg ", %%ymm15, %%ymm" #reg "\n\t"
// Both parts of 8 rows in 10 and 11
#define DOT_HALVES(low, up) HALVES(10, 8) MULTIPLY " %%ymm12, %%ymm8, %%ymm8\n\t" ADD_TO(8, up) \
    MULTIPLY " %%ymm12, %%ymm10, %%ymm10\n\t" ADD_TO(10, low) HALVES(11, 8) \
    MULTIPLY " %%ymm13, %%ymm8, %%ymm8\n\t" ADD_TO(8, up) \
    MULTIPLY " %%ymm13, %%ymm11, %%ymm11\n\t" ADD_TO(11, low)
#define JOIN(low, up) "vpmaddwd %[ones], %%ymm" #low ", %%ymm" #low "\n\t" \
    "vpmaddwd %[sixteens], %%ymm" #up ", %%ymm" #up "\n\t" \
    "vpaddd %%ymm" #up ", %%ymm" #low ", %%ymm" #low "\n\t"
#define TO_FLOAT(sum) "vcvtdq2ps %%ymm" #sum ", %%ymm" #sum "\n\t"
"""
    + NIBBLES.lstrip("\n"),
}
"""What the kinds do not share, by the name of their file."""
