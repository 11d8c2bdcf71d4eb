// Products of fp32 activations with dense weights and with four-bit tables: Kernels::matmul_float.
//
// acc = fma(x[k], w[k], acc) for k = 0, 1, 2, ... with one accumulator for each row and token, and a
// table's weight rounded once, to fp32: table[u] * scale. So the three give the same bits, whatever
// the tiling.
#pragma once
#include "kernels.h"

namespace llmr {

namespace base {
// n values of `type` (llmr_type), `stride` elements apart, as fp32.
void widen(const void *from, int64_t stride, int n, int type, float *out);

void matmul_float(const llmr_weight *w, int p0, int p1, const float *x, int64_t ldx, int t0, int t1,
                  float *out, int64_t ldo, void *scratch);
}
namespace avx2 {
void matmul_float(const llmr_weight *w, int p0, int p1, const float *x, int64_t ldx, int t0, int t1,
                  float *out, int64_t ldo, void *scratch);
}
namespace avx512 {
void matmul_float(const llmr_weight *w, int p0, int p1, const float *x, int64_t ldx, int t0, int t1,
                  float *out, int64_t ldo, void *scratch);
}

}  // namespace llmr
