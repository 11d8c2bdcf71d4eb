// Refining activations beside 4-bit weights.
//
// Language models have a few channels whose activations are many times larger than the rest. In their
// group of 32 columns an 8-bit code is then too coarse for the neighbours and, weighed by their size,
// they make most of the whole row's error. Such groups get a second 8-bit code for what the first left.
//
// A group stands out if its scale is above twice the typical one of its row, the geometric mean. On the
// starter model that is one group in eight, and the KL divergence from unquantized activations falls
// from 3.1e-3 to 6e-4 (docs/cpu-kernels.md has the table).
#pragma once
#include "kernels.h"

namespace llmr {

// Which scales of a row stand out. Taken as an integer, a positive float grows like its logarithm, so
// the mean of the integers is that of a geometric mean, and 2^23 more is a factor of 2.
struct RefineLimit {
  int64_t sum = 0, n = 0;

  static inline int32_t bits_of(float value) {
    int32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
  }
  inline void see(float scale) {
    if (scale > 0 && scale <= __FLT_MAX__) sum += bits_of(scale), n++;
  }
  // The integer above which a scale stands out.
  inline int64_t value() const { return n == 0 ? INT32_MAX : sum / n + (1 << 23); }
  static inline bool exceeded(float scale, int64_t value) {
    return scale <= __FLT_MAX__ && bits_of(scale) > value;
  }
};

// Refines a row x whose codes are in acts as token t, with an instruction set's own quantize. residual:
// memory for k_padded floats. For instruction sets that do not refine while they quantize.
void refine(const Kernels &kernels, const float *x, int t, Acts &acts, float *residual);

}  // namespace llmr
