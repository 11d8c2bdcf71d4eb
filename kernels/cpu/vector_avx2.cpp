// Vector functions for AVX2 with FMA and F16C: 8 lanes, 16 registers.
#include <immintrin.h>

#include "attend_decode.h"
#include "attend_prefill.h"

namespace llmr {
namespace {

struct F {
  static constexpr int W = 8, ROWS = 6, DECODE_ROWS = 3;
  __m256 v;

  static F set1(float x) { return {_mm256_set1_ps(x)}; }
  static F load(const float *x) { return {_mm256_loadu_ps(x)}; }
  static void store(float *out, F x) { _mm256_storeu_ps(out, x.v); }
  static F load_half(const uint16_t *x) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x)))};
  }
  static void store_half(uint16_t *out, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
  }
  static F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static F sqrt(F x) { return {_mm256_sqrt_ps(x.v)}; }
  static F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
  static F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
  static F select(F a, F b, F x, F y) {
    return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
  }
  static F scale(F x, F, F bits) {
    // MAGIC has zeros where n is shifted to; an exponent below 1 is negative here and becomes 0.
    const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(bits.v), 23);
    const __m256i power = _mm256_add_epi32(shifted, _mm256_set1_epi32(127 << 23));
    return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(_mm256_max_epi32(power, _mm256_setzero_si256())))};
  }
  static uint32_t equal(F a, F b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)));
  }
  static float sum(F x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  static float largest(F x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }

  static F quad(F a, F b, F c, F d) {
    const __m256 ab = halves(a.v, b.v), cd = halves(c.v, d.v);
    return {_mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd))};
  }
  static F join(const F (&q)[2]) {
    return {_mm256_add_ps(_mm256_blend_ps(q[0].v, q[1].v, 0xf0),
                          _mm256_permute2f128_ps(q[0].v, q[1].v, 0x21))};
  }
  static void transpose(F (&x)[8]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 4) {  // 4 x 4 within each 128 bits
      const __m256 a = _mm256_unpacklo_ps(x[i].v, x[i + 1].v), b = _mm256_unpackhi_ps(x[i].v, x[i + 1].v);
      const __m256 c = _mm256_unpacklo_ps(x[i + 2].v, x[i + 3].v);
      const __m256 d = _mm256_unpackhi_ps(x[i + 2].v, x[i + 3].v);
      t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; i++) {  // 2 x 2 of the 128 bits
      x[i].v = _mm256_permute2f128_ps(t[i], t[4 + i], 0x20);
      x[4 + i].v = _mm256_permute2f128_ps(t[i], t[4 + i], 0x31);
    }
  }

  static F keep(F x, int first, int last, F other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i early = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    const __m256i kept = _mm256_andnot_si256(early, _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
    return {_mm256_blendv_ps(other.v, x.v, _mm256_castsi256_ps(kept))};
  }

  struct Wide {
    __m256d low, high;
  };
  static void add(Wide &sums, F x) {
    sums.low = _mm256_add_pd(sums.low, _mm256_cvtps_pd(_mm256_castps256_ps128(x.v)));
    sums.high = _mm256_add_pd(sums.high, _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1)));
  }
  static double sum(const Wide &sums) {
    double lanes[4], total = 0.0;
    _mm256_storeu_pd(lanes, _mm256_add_pd(sums.low, sums.high));
    for (double lane : lanes) total += lane;
    return total;
  }

 private:
  // In each 128 bits: a0 + a2, a1 + a3, b0 + b2, b1 + b3.
  static __m256 halves(__m256 a, __m256 b) {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_blend_pd(x, y, 0xa)),
                         _mm256_castpd_ps(_mm256_shuffle_pd(x, y, 0x5)));
  }
};

inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }

}  // namespace

namespace avx2 {
#include "vector_functions.h"
}
}  // namespace llmr
