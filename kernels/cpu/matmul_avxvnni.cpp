// The integer matmul with the dot product instructions on 256-bit registers (AVX-VNNI): 16 rows beside
// 2 to 5 tokens, or one or two panels beside one token. All sums are int32.
#include "matmul_tiles.h"

namespace llmr {
namespace {

struct DotW4 {
  static constexpr int KIND = LLMR_W4;
  static constexpr bool SPLIT = false;
  static __m256i add(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
  static __m256i total(__m256i sum) { return sum; }
};

struct DotW8 {
  static constexpr int KIND = LLMR_W8;
  // An addition takes 5 cycles and a group is up to 64 of them: with 2 tokens 17 instead of 13 products a
  // cycle. W4's groups are 8, and the next one starts meanwhile.
  static constexpr bool SPLIT = true;
  static __m256i add(__m256i sum, __m256i w, __m256i x) { return _mm256_dpwssd_avx_epi32(sum, w, x); }
  static __m256i total(__m256i sum) { return sum; }
};

struct Isa {
  static constexpr int PANELS = 2;
  static Kernel gemm(const llmr_weight &w, int tokens) {
    return w.kind == LLMR_W4 ? gemm_kernel<DotW4>(w, tokens) : gemm_kernel<DotW8>(w, tokens);
  }
  static Kernel gemv(const llmr_weight &w, int panels) {
    return w.kind == LLMR_W4 ? gemv_kernel<DotW4>(w, panels) : gemv_kernel<DotW8>(w, panels);
  }
};

}  // namespace

namespace avxvnni {

size_t codes_bytes(int kind, int tokens, int k_padded) {
  return size_t(tokens) * k_padded * code_bytes(kind);
}

size_t init_bytes(int, int tokens, int k_padded, int group) {
  return size_t(tokens) * (k_padded / group) * sizeof(int32_t);
}

void quantize(const float *x, int64_t ldx, int t0, int t1, Acts *acts) {
  quantize_tokens<false>(x, ldx, t0, t1, acts);
}

void matmul(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out, int64_t ldo,
            void *) {
  matmul_tiles<Isa>(w, p0, p1, acts, t0, t1, out, ldo);
}

}  // namespace avxvnni
}  // namespace llmr
