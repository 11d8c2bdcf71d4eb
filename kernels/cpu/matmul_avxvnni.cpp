// The integer matmul with the dot product instructions on 256-bit registers (AVX-VNNI): 16 rows beside
// 2 to 5 tokens, or one or two panels beside one token. All sums are int32.
#include "matmul_tiles.h"

namespace llmr {
namespace {

struct DotW4 {
  static constexpr int KIND = LLMR_W4;
  static constexpr bool SPLIT = false, LEVELS = false;
  explicit DotW4(const Walk &) {}
  static __m256i start(const int32_t *init) { return broadcast(init); }
  static __m256i weights(__m256i codes) { return codes; }
  static __m256i add(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
  static __m256i total(__m256i sum) { return sum; }
};

// Levels with 128 added, so that they are unsigned; 128 * the sum comes off at the start.
struct DotLevels {
  static constexpr int KIND = LLMR_W4;
  static constexpr bool SPLIT = false, LEVELS = true;
  __m256i levels;
  explicit DotLevels(const Walk &a) : levels(load_levels(*a.weight, 128)) {}
  static __m256i start(const int32_t *init) { return _mm256_slli_epi32(broadcast(init), 4); }
  __m256i weights(__m256i codes) const { return _mm256_shuffle_epi8(levels, codes); }
  static __m256i add(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
  static __m256i total(__m256i sum) { return sum; }
};

struct DotW8 {
  static constexpr int KIND = LLMR_W8;
  // An addition takes 5 cycles and a group is up to 64 of them: with 2 tokens 17 instead of 13 products a
  // cycle. W4's groups are 8, and the next one starts meanwhile.
  static constexpr bool SPLIT = true, LEVELS = false;
  explicit DotW8(const Walk &) {}
  static __m256i start(const int32_t *init) { return broadcast(init); }
  static __m256i weights(__m256i codes) { return codes; }
  static __m256i add(__m256i sum, __m256i w, __m256i x) { return _mm256_dpwssd_avx_epi32(sum, w, x); }
  static __m256i total(__m256i sum) { return sum; }
};

struct Isa {
  static int panels(const llmr_weight &) { return 2; }
  static void look_up(const llmr_weight &, Walk &) {}
  static Kernel gemm(const llmr_weight &w, int tokens) {
    if (w.kind == LLMR_LUT8) return gemm_kernel<DotLevels>(w, tokens);
    return w.kind == LLMR_W4 ? gemm_kernel<DotW4>(w, tokens) : gemm_kernel<DotW8>(w, tokens);
  }
  static Kernel gemv(const llmr_weight &w, int panels) {
    if (w.kind == LLMR_LUT8) return gemv_kernel<DotLevels>(w, panels);
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
