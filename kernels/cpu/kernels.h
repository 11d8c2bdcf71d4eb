// What one instruction set provides. Each ISA file fills one table; dispatch.cpp chooses at start.
//
// Everything in an ISA file is static or in an anonymous namespace, and no standard header with
// inline functions is included there: the linker may keep the copy of any file, and one compiled
// for AVX512 would crash elsewhere.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

namespace llmr {

constexpr int ROWS = 16;        // rows of a panel
constexpr int W4_GROUP = 32;    // columns an activation scale covers beside 4-bit weights
constexpr int W8_GROUP = 128;   // beside 8-bit weights: min(this, the weight's group)
constexpr int FEW_TOKENS = 8;   // a step of at most so many is bound by memory, not arithmetic
constexpr int GATHER_TOKENS = 128;    // a token block of matmul starts at a multiple of this
constexpr int MAX_TOKEN_BLOCK = 256;  // tokens of one matmul, at most
constexpr int W8_LIMIT = 32639;
constexpr size_t SCRATCH = 4 << 20;  // bytes of scratch of each worker
constexpr size_t MATMUL_SCRATCH = 2 << 20;  // of them for one matmul

// Activations of `tokens` tokens, quantized beside one kind of weight, in the layout of one ISA.
//   W4 (LUT8 takes the same): int8 per 32 columns, scale = absmax / 127, code = round to nearest even (x * (127 / absmax)),
//       never -128.
//   W8: 16 bits per `group` columns, scale = absmax / W8_LIMIT, code = round to nearest even
//       (x * (W8_LIMIT / absmax)). Codes up to W8_LIMIT = 127 * 256 + 127 split into two signed bytes.
// A group whose largest magnitude is below TINY counts as zero (scale and codes 0): LIMIT / absmax must
// not overflow. One with a value that is not finite has codes 0 and that scale: its results are not
// finite either.
// scale and sum are [k_padded/group][tokens] everywhere; sum = scale * float(sum of the codes).
// The layout of codes and `init` is the ISA's own affair.
//
// Beside 4-bit weights, groups that stand out of their row are refined: what their codes leave is
// quantized once more, into `fine` (refine.cpp says which and why). There, groups that are not refined
// have scale 0 and codes that mean nothing.
constexpr float TINY = 0x1p-100f;
struct Acts {
  int32_t tokens;  // from one group to the next: the tokens there are, or more
  int32_t k, k_padded;
  int32_t group;
  int32_t kind;  // LLMR_W4 or LLMR_W8
  uint8_t *codes;
  float *scale;
  float *sum;
  int32_t *init;
  Acts *fine;          // null: nothing is refined
  uint64_t *refined;   // [tokens][words] bits: groups of each token that are
  int32_t words;
  uint8_t *gathered;   // what Kernels::gather made of `fine`, or null
};

// A norm over a row: with y = x, or x - mean(x) if it is LLMR_LAYER_NORM,
//   y / sqrt(mean(y^2) + eps) * (gamma + offset) + beta; beta null: 0.
// LLMR_NO_NORM: the row as it is, which nobody asks a kernel for.
struct Norm {
  int kind;  // llmr_norm
  const float *gamma, *beta;
  float eps, offset;
};

// Linears are batch invariant: with d the exact integer dot product of group g, every width, tiling,
// thread count and ISA evaluates, in group order and in fp32,
//   without mins: d over (u - 8) or (u - 128);  acc = fma(float(d), ws * as, acc)
//   with mins:    d over u;                     acc = fma(float(d), ws * as, acc)
//                                               acc = fma(m, sum, acc)
//   LUT8:         d over levels[u];             acc = fma(float(d), (ws * unit) * as, acc)
// m is a minimum, or -(ws * z) for a zero point z. ws * unit is exact but where it leaves fp32's range.
// where a weight group larger than the activation group uses its ws for each activation group. The
// refined groups of the same row follow, in their order, with scale and sum of `fine`.
struct Kernels {
  const char *name;

  // Bytes of Acts::codes and of Acts::init for T tokens of k_padded columns.
  size_t (*codes_bytes)(int kind, int tokens, int k_padded);
  size_t (*init_bytes)(int kind, int tokens, int k_padded, int group);

  // Quantizes rows t0..t1 of x (row t at x + (t - t0) * ldx). Columns k..k_padded count as 0.
  // `refines`: acts->fine is written too; if not, refine() must follow.
  bool refines;
  void (*quantize)(const float *x, int64_t ldx, int t0, int t1, Acts *acts);

  // out[(t - t0) * ldo + 16 * (p - p0) + row] = product of panels p0..p1 with tokens t0..t1.
  // W4, W8 and LUT8. scratch: MATMUL_SCRATCH bytes, 64-byte aligned.
  void (*matmul)(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out,
                 int64_t ldo, void *scratch);

  // The same for DENSE and LUT4 with fp32 activations: x row t at x + t * ldx. One fma per column,
  // in column order, so a row's result does not depend on the width either.
  void (*matmul_float)(const llmr_weight *w, int p0, int p1, const float *x, int64_t ldx, int t0,
                       int t1, float *out, int64_t ldo, void *scratch);

  // Norms n values; out may be x.
  void (*normalize)(const float *x, const Norm &norm, int n, float *out);

  // out = activation(gate) * up, as kernels/ops.py says; gate null: activation(up).
  void (*gate_up)(const float *gate, const float *up, float *out, int n, int activation);

  // out = x + bias; bias null: 0, here and below.
  void (*finish)(const float *x, const float *bias, float *out, int n);

  // out += (x + bias) * scale
  void (*add)(const float *x, const float *bias, float scale, float *out, int n);

  // x = softcap * tanh(x / softcap)
  void (*cap)(float *x, int n, float softcap);

  // Rotates pairs (i, i + n_freq) of one head in place by cos, sin [n_freq].
  void (*rotate)(float *head, const float *cos, const float *sin, int n_freq);

  // Converts n values between fp32 and cache elements of `type`.
  void (*store)(const float *x, void *out, int n, int type);

  // Attention of the query heads that share a kv head, over all keys they see; see attention.h.
  void (*attend)(const struct AttendTile *tile, void *scratch);

  // Vector parts of pick: largest value and its lowest index; false if a value is not finite.
  bool (*largest)(const float *x, int n, float *value, int *index);
  // sum of exp(x - shift) in double.
  double (*sum_exp)(const float *x, int n, float shift);

  // Attention of a few tokens: one chunk of the keys, and the merge of all chunks in their order.
  void (*attend_chunk)(const struct AttendTile *tile, int chunk, float *partial, void *scratch);
  void (*attend_merge)(const struct AttendTile *tile, const float *partials);

  // Puts the refined groups of tokens t0..t1 together, for matmul of many tokens; t0 is a multiple of
  // GATHER_TOKENS, t1 - t0 at most that. Null where matmul takes them from `fine`.
  size_t (*gathered_bytes)(int tokens, int k_padded);
  void (*gather)(const Acts *acts, int t0, int t1);
};



// ---- workers --------------------------------------------------------------------------------------

// One of the threads that walk a program together. All of them call the same op function.
struct Worker {
  int id, n;              // this one, of so many
  const Kernels *kernels;
  uint8_t *scratch;       // SCRATCH bytes of its own, 64-byte aligned
  struct Shared *shared;  // of all workers, see pool.h

  // Waits until all workers are here; afterwards take() counts from 0 again.
  void barrier();
  // The next chunk number nobody has taken since the last barrier.
  int take();
  // Memory of all workers, the same pointer for each; valid within one op. 64-byte aligned.
  uint8_t *common(size_t bytes);
};

// An op is run by all workers at once. It does not end with a barrier; the program puts one behind
// each op.
using Op = void (*)(Worker &, const llmr_instr &, const llmr_step &);
void op_embed(Worker &, const llmr_instr &, const llmr_step &);
void op_norm_linear(Worker &, const llmr_instr &, const llmr_step &);
void op_rope_append(Worker &, const llmr_instr &, const llmr_step &);
void op_attend(Worker &, const llmr_instr &, const llmr_step &);
void op_linear_add(Worker &, const llmr_instr &, const llmr_step &);
void op_norm_gate_up(Worker &, const llmr_instr &, const llmr_step &);
void op_moe_add(Worker &, const llmr_instr &, const llmr_step &);
void op_norm_head(Worker &, const llmr_instr &, const llmr_step &);

}  // namespace llmr
