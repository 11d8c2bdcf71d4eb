// The integer matmul with AVX2. Kernels are GNU assembly, written by generate.py: one panel beside 2
// to 5 tokens, or one or two panels beside one token. Compilers without it (or with LLMR_INTRINSICS defined)
// take the same kernels from intrinsics, with the same bits.
#include "matmul_tiles.h"

#if defined(__GNUC__) && !defined(LLMR_INTRINSICS)
#define LLMR_ASSEMBLY 1
#endif

namespace llmr {
namespace {

constexpr int PANELS = 2;

// Whether LUT8 is multiplied like W4: sums of 16 products with levels up to 16 fit int16.
bool has_small_levels(const llmr_weight &w) {
  int largest = 0;
  for (int u = 0; u < 16; u++) largest = most(largest, w.levels[u] < 0 ? -w.levels[u] : w.levels[u]);
  return largest <= 16;
}

#ifdef LLMR_ASSEMBLY

alignas(32) const uint8_t MASKS[32] = {15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15,
                                       15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15};
alignas(32) const int16_t ONES[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
alignas(32) const int16_t SIXTEENS[16] = {16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16};

// A kernel for half a panel beside several tokens, on both. HALF: bytes of 8 scales.
template <Kernel HALF_KERNEL, int HALF>
void both_halves(Walk a) {
  HALF_KERNEL(a);
  a.w += 32;
  a.ws += HALF;
  a.acc += 8;
  HALF_KERNEL(a);
}

struct Table {
  Kernel gemm[WIDEST + 1];  // by tokens
  Kernel gemv[PANELS + 1];  // by panels
};

namespace f16 {
#define LOAD(at, reg) "vcvtph2ps " at ", %%ymm" #reg "\n\t"
#define ROW 32
#define HALF 16
#include "levels_avx2.inc"
#include "small_avx2.inc"
#include "w4_avx2.inc"
#include "w8_avx2.inc"
#undef LOAD
}  // namespace f16

namespace bf16 {
#define LOAD(at, reg) \
  "vpmovzxwd " at ", %%ymm" #reg "\n\tvpslld $16, %%ymm" #reg ", %%ymm" #reg "\n\t"
#include "levels_avx2.inc"
#include "small_avx2.inc"
#include "w4_avx2.inc"
#include "w8_avx2.inc"
#undef LOAD
#undef ROW
#undef HALF
}  // namespace bf16

namespace f32 {
#define LOAD(at, reg) "vmovups " at ", %%ymm" #reg "\n\t"
#define ROW 64
#define HALF 32
#include "levels_avx2.inc"
#include "small_avx2.inc"
#include "w4_avx2.inc"
#include "w8_avx2.inc"
#undef LOAD
#undef ROW
#undef HALF
}  // namespace f32

const Table &table(const llmr_weight &w) {
  const bool w4 = w.kind == LLMR_W4;
  if (w.kind == LLMR_LUT8) {
    const bool small = has_small_levels(w);
    switch (w.type) {
      case LLMR_F16: return small ? f16::small[0] : f16::levels[0];
      case LLMR_BF16: return small ? bf16::small[0] : bf16::levels[0];
      default: return small ? f32::small[0] : f32::levels[0];
    }
  }
  const int i = w.mins == nullptr ? 0 : w.min_type == LLMR_U8 ? 2 : 1;
  switch (w.type) {
    case LLMR_F16: return w4 ? f16::w4[i] : f16::w8[i];
    case LLMR_BF16: return w4 ? bf16::w4[i] : bf16::w8[i];
    default: return w4 ? f32::w4[i] : f32::w8[i];
  }
}

struct Isa {
  static int panels(const llmr_weight &w) { return w.kind == LLMR_LUT8 && !has_small_levels(w) ? 1 : PANELS; }
  // See generate.py.
  static void look_up(const llmr_weight &w, Walk &walk) {
    const bool small = has_small_levels(w);
    for (int u = 0; u < 16; u++) {
      const uint8_t level = uint8_t(w.levels[u] + (small ? 16 : 128));
      walk.levels[u] = small ? level : level >> 4;
      walk.lower[u] = level & 15;
    }
    walk.unit = w.unit;
  }
  static Kernel gemm(const llmr_weight &w, int tokens) { return table(w).gemm[tokens]; }
  static Kernel gemv(const llmr_weight &w, int panels) { return table(w).gemv[panels]; }
};

#else

// Sums of W4 are two int16 a row: 8 sums of two products are at most 8 * 2 * 15 * 127 = 30480.
struct DotW4 {
  static constexpr int KIND = LLMR_W4;
  static constexpr bool SPLIT = false, LEVELS = false;
  explicit DotW4(const Walk &) {}
  static __m256i start(const int32_t *init) { return broadcast(init); }
  static __m256i weights(__m256i codes) { return codes; }
  static __m256i add(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
  }
  static __m256i total(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
};

// The same for levels up to 16, with 16 added.
struct DotSmall {
  static constexpr int KIND = LLMR_W4;
  static constexpr bool SPLIT = false, LEVELS = true;
  __m256i levels;
  explicit DotSmall(const Walk &a) : levels(load_levels(*a.weight, 16)) {}
  static __m256i start(const int32_t *init) { return _mm256_slli_epi16(broadcast(init), 1); }
  __m256i weights(__m256i codes) const { return _mm256_shuffle_epi8(levels, codes); }
  static __m256i add(__m256i sum, __m256i w, __m256i x) { return DotW4::add(sum, w, x); }
  static __m256i total(__m256i sum) { return DotW4::total(sum); }
};

// Any levels: a pair of products, at most 2 * 128 * 127, just fits int16; sums are int32.
struct DotLevels {
  static constexpr int KIND = LLMR_W4;
  static constexpr bool SPLIT = false, LEVELS = true;
  __m256i levels;
  explicit DotLevels(const Walk &a) : levels(load_levels(*a.weight, 0)) {}
  static __m256i start(const int32_t *) { return _mm256_setzero_si256(); }
  __m256i weights(__m256i codes) const { return _mm256_shuffle_epi8(levels, codes); }
  static __m256i add(__m256i sum, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static __m256i total(__m256i sum) { return sum; }
};

struct DotW8 {
  static constexpr int KIND = LLMR_W8;
  static constexpr bool SPLIT = false, LEVELS = false;
  explicit DotW8(const Walk &) {}
  static __m256i start(const int32_t *init) { return broadcast(init); }
  static __m256i weights(__m256i codes) { return codes; }
  static __m256i add(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
  }
  static __m256i total(__m256i sum) { return sum; }
};

struct Isa {
  static int panels(const llmr_weight &) { return PANELS; }
  static void look_up(const llmr_weight &, Walk &) {}
  static Kernel gemm(const llmr_weight &w, int tokens) {
    if (w.kind == LLMR_LUT8) return has_small_levels(w) ? gemm_kernel<DotSmall>(w, tokens) : gemm_kernel<DotLevels>(w, tokens);
    return w.kind == LLMR_W4 ? gemm_kernel<DotW4>(w, tokens) : gemm_kernel<DotW8>(w, tokens);
  }
  static Kernel gemv(const llmr_weight &w, int panels) {
    if (w.kind == LLMR_LUT8) return has_small_levels(w) ? gemv_kernel<DotSmall>(w, panels) : gemv_kernel<DotLevels>(w, panels);
    return w.kind == LLMR_W4 ? gemv_kernel<DotW4>(w, panels) : gemv_kernel<DotW8>(w, panels);
  }
};

#endif

}  // namespace

namespace avx2 {

size_t codes_bytes(int kind, int tokens, int k_padded) {
  return size_t(tokens) * k_padded * code_bytes(kind);
}

size_t init_bytes(int, int tokens, int k_padded, int group) {
  return size_t(tokens) * (k_padded / group) * sizeof(int32_t);
}

void quantize(const float *x, int64_t ldx, int t0, int t1, Acts *acts) {
  quantize_tokens<true>(x, ldx, t0, t1, acts);
}

void matmul(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out, int64_t ldo,
            void *) {
  matmul_tiles<Isa>(w, p0, p1, acts, t0, t1, out, ldo);
}

}  // namespace avx2
}  // namespace llmr
