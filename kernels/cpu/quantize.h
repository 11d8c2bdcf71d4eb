// Quantizers that need no torch: plain functions that keep no state and work on one thread.
#pragma once
#include <stdint.h>

#include "abi.h"

// Symmetric 8-bit codes (q + 128) [n_groups, group] of weights of `type` (llmr_type), and a scale of the same
// type for each group: s = absmax / 127, rounded to that type; 1 if that is zero; q = w / s to nearest even.
// All in fp32 with true division, so the bits are those of quant/int8.py with torch. `group` is at most 128.
// Returns the index of the first weight that is not finite, where it stops; -1: all are.
LLMR_API int64_t llmr_quantize_int8(int32_t type, const void *weights, int64_t n_groups, int32_t group,
                                    uint8_t *codes, void *scales);

// What a code u of a group stands for, with the group's scale s.
enum llmr_grid : int32_t {
  LLMR_GRID_INT4 = 0,       // s * (u - 8)
  LLMR_GRID_INT4_ZERO = 1,  // s * (u - z), z = 0..15
  LLMR_GRID_TABLE = 2,      // s * table[u], u = 0..15
  LLMR_GRID_INT8 = 3        // s * (u - 128)
};

// One weight [n, k] to quantize; quant/search.py and quant/compensation.py are the definition. `group` is 32,
// 64 or 128 and divides k and every width.
struct llmr_quantization {
  int32_t grid;     // llmr_grid
  int32_t type;     // llmr_type of weights and scales
  int32_t group;
  int32_t ends;      // of a grid with signed scales that the extreme weight is tried on: 1 or 2
  int32_t refits;    // least-squares steps after the candidates
  int32_t n_blocks;  // of columns within which errors are compensated; 0: they are not
  int64_t n, k;
  const void *weights;
  const float *importance;      // [k]: how much a column's error counts in the search; null: all 1
  const float *table;           // [16] ascending, for LLMR_GRID_TABLE
  const int64_t *widths;        // [n_blocks] columns of each block, together k; at most 2048 each
  const float *const *factors;  // [n_blocks] -> [width, width]: the part of column j's error that column i > j
                                // takes over is at j * width + i; the rest is not looked at
  uint8_t *codes;   // [n, k / 2], low nibble = even column; LLMR_GRID_INT8: [n, k]
  void *scales;     // [n, k / group]
  uint8_t *zeros;   // [n, k / group], for LLMR_GRID_INT4_ZERO
};

// Quantizes rows row0..row1 with the kernels of an instruction set ("base", "avx2", "avx512"; null: the best).
// All give the same bytes. Returns -1; or the index of the first weight that is not finite, where it stops;
// or -2: no memory; or -3: there is no such instruction set here.
LLMR_API int64_t llmr_quantize(const llmr_quantization *what, int64_t row0, int64_t row1, const char *isa);
