// The integer matmul of three instruction sets: the first four entries of `Kernels`, with the bits
// that `Acts` in kernels.h defines. matmul_base.cpp is the definition to read.
#pragma once
#include "kernels.h"

namespace llmr {

// A group whose largest value is below this counts as zero (scale and codes 0): W8_LIMIT / absmax must
// not overflow. A group with a value that is not finite has codes 0 and that scale, so results are not
// finite either.
constexpr float TINY = 0x1p-100f;

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
