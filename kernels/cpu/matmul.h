// The integer matmul of three instruction sets: the first four entries of `Kernels`, with the bits
// that `Acts` in kernels.h defines. matmul_base.cpp is the definition to read.
#pragma once
#include "kernels.h"

namespace llmr {

constexpr int MOST_GROUPS = 4096;  // activation groups of a row that may be refined

// Groups that are refined for at least one of the tokens, in order; returns how many.
static inline int refined_groups(const Acts &a, int t0, int t1, int32_t *groups) {
  int n = 0;
  for (int i = 0; a.fine != nullptr && i < a.words; i++) {
    uint64_t bits = 0;
    for (int t = t0; t < t1; t++) bits |= a.refined[static_cast<int64_t>(t) * a.words + i];
    for (; bits != 0; bits &= bits - 1) groups[n++] = i * 64 + __builtin_ctzll(bits);
  }
  return n;
}

#define LLMR_MATMUL(isa)                                                                            \
  namespace isa {                                                                                   \
  size_t codes_bytes(int kind, int tokens, int k_padded);                                           \
  size_t init_bytes(int kind, int tokens, int k_padded, int group);                                 \
  void quantize(const float *x, int64_t ldx, int t0, int t1, Acts *acts);                           \
  void matmul(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out,   \
              int64_t ldo, void *scratch);                                                          \
  }
LLMR_MATMUL(base)
LLMR_MATMUL(avx2)
LLMR_MATMUL(avxvnni)
#undef LLMR_MATMUL

}  // namespace llmr
