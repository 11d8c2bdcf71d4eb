// Integer matmul with AMX tiles for many tokens, AVX512-VNNI for few; see kernels.h for the functions.
#pragma once
#include "kernels.h"

namespace llmr {
namespace amx {

size_t codes_bytes(int kind, int tokens, int k_padded);
size_t init_bytes(int kind, int tokens, int k_padded, int group);
void quantize(const float *x, int64_t ldx, int t0, int t1, Acts *acts);
size_t gathered_bytes(int tokens, int k_padded);
void gather(const Acts *acts, int t0, int t1);
void matmul(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out, int64_t ldo,
            void *scratch);

}  // namespace amx
}  // namespace llmr
