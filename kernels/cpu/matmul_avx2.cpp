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

#ifdef LLMR_ASSEMBLY

struct Table {
  Kernel gemm[WIDEST + 1];  // by tokens
  Kernel gemv[PANELS + 1];  // by panels
};

namespace f16 {
#define LOAD(at, reg) "vcvtph2ps " at ", %%ymm" #reg "\n\t"
#define ROW 32
#define HALF 16
#include "w4_avx2.inc"
#include "w8_avx2.inc"
#undef LOAD
}  // namespace f16

namespace bf16 {
#define LOAD(at, reg) \
  "vpmovzxwd " at ", %%ymm" #reg "\n\tvpslld $16, %%ymm" #reg ", %%ymm" #reg "\n\t"
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
#include "w4_avx2.inc"
#include "w8_avx2.inc"
#undef LOAD
#undef ROW
#undef HALF
}  // namespace f32

const Table &table(const llmr_weight &w) {
  const bool w4 = w.kind == LLMR_W4;
  const int i = w.mins != nullptr;
  switch (w.type) {
    case LLMR_F16: return w4 ? f16::w4[i] : f16::w8[i];
    case LLMR_BF16: return w4 ? bf16::w4[i] : bf16::w8[i];
    default: return w4 ? f32::w4[i] : f32::w8[i];
  }
}

struct Isa {
  static constexpr int PANELS = llmr::PANELS;
  static Kernel gemm(const llmr_weight &w, int tokens) { return table(w).gemm[tokens]; }
  static Kernel gemv(const llmr_weight &w, int panels) { return table(w).gemv[panels]; }
};

#else

// Sums of W4 are two int16 a row: 8 sums of two products are at most 8 * 2 * 15 * 127 = 30480.
struct DotW4 {
  static constexpr int KIND = LLMR_W4;
  static constexpr bool SPLIT = false;
  static __m256i add(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
  }
  static __m256i total(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
};

struct DotW8 {
  static constexpr int KIND = LLMR_W8;
  static constexpr bool SPLIT = false;
  static __m256i add(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
  }
  static __m256i total(__m256i sum) { return sum; }
};

struct Isa {
  static constexpr int PANELS = llmr::PANELS;
  static Kernel gemm(const llmr_weight &w, int tokens) {
    return w.kind == LLMR_W4 ? gemm_kernel<DotW4>(w, tokens) : gemm_kernel<DotW8>(w, tokens);
  }
  static Kernel gemv(const llmr_weight &w, int panels) {
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
