// Integer matmul with AVX512-VNNI; see kernels.h for what each function does.
#pragma once
#include "kernels.h"

namespace llmr {
namespace avx512 {

size_t codes_bytes(int kind, int tokens, int k_padded);
size_t init_bytes(int kind, int tokens, int k_padded, int group);
void quantize(const float *x, int64_t ldx, int t0, int t1, Acts *acts);
void matmul(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out, int64_t ldo,
            void *scratch);

}  // namespace avx512
}  // namespace llmr
