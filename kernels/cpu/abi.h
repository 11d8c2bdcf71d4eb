// The C interface of the native CPU library: every structure that Python (abi.py) and C++ share.
//
// Shapes as in kernels/ops.py: T tokens, D hidden size, H query heads, Hkv key/value heads, dh head
// size, F intermediate size, R rows whose logits are wanted, V vocabulary rows. All arrays are
// row-major and little-endian; activations are fp32. A structure never owns memory.
#pragma once
#include <stdint.h>

#define LLMR_ABI 5  // raised with every change below; Python refuses a library of another number

#if defined(_WIN32)
#define LLMR_API extern "C" __declspec(dllexport)
#else
#define LLMR_API extern "C" __attribute__((visibility("default")))
#endif

enum llmr_type : int32_t { LLMR_F16 = 0, LLMR_BF16 = 1, LLMR_F32 = 2, LLMR_U8 = 3 };

enum llmr_kind : int32_t { LLMR_W4 = 0, LLMR_W8 = 1, LLMR_DENSE = 2, LLMR_LUT4 = 3, LLMR_LUT8 = 4 };

// A weight [n, k] in panels of 16 rows; docs/cpu-kernels.md has the picture. Rows are padded to a
// multiple of 16, columns to k_padded; padding weighs nothing.
//   W4     codes [panel][k_padded/32][j 0..3][row 0..15][b 0..3], a byte holds k = 8j + b in its low
//          and k = 8j + 4 + b in its high nibble. Weight: (u - 8) * scale, with mins u * scale + min.
//   LUT4   codes as W4. Weight: table[u] * scale, multiplied in fp32.
//   LUT8   the same where table[u] = levels[u] * unit, with integer levels: multiplied as integers.
//   W8     codes [panel][k_padded/4][row 0..15][b 0..3]. Weight: (u - 128) * scale, or with mins.
//   DENSE  codes [panel][k][row 0..15] of `type`; no scales.
// scales and mins: [panel][k_padded/group][row 0..15], of `type` and of `min_type`. Mins of U8 are zero points
// z and stand for -(scale * z), a product rounded to fp32.
struct llmr_weight {
  int32_t kind;
  int32_t type;
  int32_t n, k, k_padded;
  int32_t group;   // columns one scale covers: 16, 32, 64, 128, or k_padded for a whole row
  int32_t panels;  // (n + 15) / 16
  int32_t min_type;  // `type`, or U8
  uint8_t *codes;
  void *scales;
  void *mins;          // null: none
  const float *table;  // LUT4 and LUT8: 16 values
  const int32_t *order;  // column j multiplies input order[j]; null: j. The same for all weights of an op
  float unit;            // LUT8: a power of two
  int8_t levels[16];     // LUT8
};

// Where a weight comes from. Its row r is row order[r] there (order null: row r).
struct llmr_source {
  int32_t gguf;        // GGUF's number of a type of blocks (gguf.h); -1: rows as in kernels/forms.py
  int32_t row_blocks;  // GGUF: blocks of a row
  int64_t row_bytes;   // from one row of codes, or of blocks, to the next. Codes of W8: k bytes, or
                       // k/2 with two codes in a byte, which are widened
  const void *codes;   // DENSE: the numbers; GGUF: the blocks, which hold scales and minima too
  const void *scales;
  const void *mins;
  const int32_t *order;
};

// Keys and values of one layer: [slot][kv head][position][dh] of `type` (F16 or F32) each.
struct llmr_kv {
  int32_t n_slots, capacity, n_kv_heads, head_dim;
  int32_t type, reserved;
  void *keys, *values;
};

// `count` tokens of one sequence: rows start.. of the step, in cache slot `slot`, the first of them
// at `position`.
struct llmr_span {
  int32_t slot, start, count, position;
};

// Everything that changes from call to call.
struct llmr_step {
  int32_t n_tokens, n_rows, n_spans, reserved;
  int32_t *token_ids;  // [T]
  int32_t *positions;  // [T]
  int32_t *rows;       // [R]
  llmr_span *spans;    // [n_spans]; cover the T rows in order, without gaps
};

enum llmr_activation : int32_t { LLMR_SILU = 0, LLMR_GELU_TANH = 1, LLMR_SWIGLU_CLAMPED = 2 };

// What stands for a norm of kernels/ops.py. WHOLE, for queries and keys: RMS over all heads of a token.
enum llmr_norm : int32_t { LLMR_NO_NORM = 0, LLMR_RMS_NORM = 1, LLMR_LAYER_NORM = 2, LLMR_WHOLE_RMS_NORM = 3 };

// Ops of kernels/ops.py. Fields of llmr_instr by op; a missing pointer is null. `norm` is an llmr_norm;
// gamma, beta (null: none), eps and offset belong to it:
//   EMBED        p: table, h                      i: D                       f: scale
//   NORM_LINEAR  p: h, gamma, beta, y, W0..W2, b0..b2   i: norm, n linears, D, sum of N   f: eps, offset
//   ROPE_APPEND  p: y, q gamma, q beta, k gamma, k beta, inv_freq, kv, angles, ready
//                i: q norm, k norm, H, Hkv, dh, n freq (0: no rotation)
//                f: q eps, q offset, k eps, k offset, attention factor
//                angles: memory for [capacity][2][n freq] cosines and sines, shared by all layers of one
//                rope; ready: a zero byte for each of its positions that is not there yet
//   ATTEND       p: y, o, kv, sinks               i: H, Hkv, dh, window (0: none)  f: scale, softcap (0: none)
//   LINEAR_ADD   p: x, gamma, beta, W, b, h       i: norm (post), K, N       f: eps, offset, scale
//   NORM_GATE_UP p: h, gamma, beta, gate W (null: no gate), gate b, up W, up b, a
//                i: norm, D, F, activation                                   f: eps, offset
//   MOE_ADD      p: h, gamma, beta, router W, router b, experts (6 pointers each, as gate..b up..b down..b)
//                i: norm, D, F, n experts, top k, normalize, activation      f: eps, offset, scale
//   NORM_HEAD    p: h, gamma, beta, W, b, logits  i: norm, D, V              f: eps, offset, scale, softcap (0: none)
enum llmr_op : int32_t {
  LLMR_EMBED = 0,
  LLMR_NORM_LINEAR,
  LLMR_ROPE_APPEND,
  LLMR_ATTEND,
  LLMR_LINEAR_ADD,
  LLMR_NORM_GATE_UP,
  LLMR_MOE_ADD,
  LLMR_NORM_HEAD,
  LLMR_N_OPS
};

struct llmr_instr {
  int32_t op;
  int32_t i[7];
  float f[6];
  int32_t reserved[2];
  void *p[10];
};

// One row to choose from; see kernels/ops.py, PickRequest and Sampling.
struct llmr_pick_request {
  double temperature, top_p, min_p, repeat_penalty;
  uint64_t seed, draw;
  int32_t vocab, top_k, n_top, n_history, n_allowed, n_bias;
  const int32_t *history;
  const int32_t *allowed;  // null: all
  const int32_t *bias_ids;
  const double *bias;
};

// status 0: chosen; 1: a logit is not finite; 2: no memory; 3: mask and bias leave nothing to choose.
struct llmr_pick_result {
  int32_t token_id, status;
  double logprob;
  int32_t *top_ids;     // [n_top], by the caller
  double *top_logprobs;  // [n_top]
};
