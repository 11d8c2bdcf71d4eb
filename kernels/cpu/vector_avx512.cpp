// Vector functions for AVX512: 16 lanes, 32 registers.
#include <immintrin.h>

#include "attend_decode.h"
#include "attend_prefill.h"

namespace llmr {
namespace {

struct F {
  static constexpr int W = 16, ROWS = 12, DECODE_ROWS = 6;
  __m512 v;

  static F set1(float x) { return {_mm512_set1_ps(x)}; }
  static F load(const float *x) { return {_mm512_loadu_ps(x)}; }
  static void store(float *out, F x) { _mm512_storeu_ps(out, x.v); }
  static F load_half(const uint16_t *x) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)))};
  }
  static void store_half(uint16_t *out, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out),
                        _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static F sqrt(F x) { return {_mm512_sqrt_ps(x.v)}; }
  static F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
  static F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
  static F select(F a, F b, F x, F y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
  }
  static F scale(F x, F n, F) { return {_mm512_scalef_ps(x.v, n.v)}; }
  static uint32_t equal(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
  static float sum(F x) {
    __m512 y = _mm512_add_ps(x.v, _mm512_shuffle_f32x4(x.v, x.v, 0x4e));
    y = _mm512_add_ps(y, _mm512_shuffle_f32x4(y, y, 0xb1));
    y = _mm512_add_ps(y, _mm512_permute_ps(y, 0x4e));
    return _mm512_cvtss_f32(_mm512_add_ps(y, _mm512_permute_ps(y, 0xb1)));
  }
  static float largest(F x) {
    __m512 y = _mm512_max_ps(x.v, _mm512_shuffle_f32x4(x.v, x.v, 0x4e));
    y = _mm512_max_ps(y, _mm512_shuffle_f32x4(y, y, 0xb1));
    y = _mm512_max_ps(y, _mm512_permute_ps(y, 0x4e));
    return _mm512_cvtss_f32(_mm512_max_ps(y, _mm512_permute_ps(y, 0xb1)));
  }

  static F quad(F a, F b, F c, F d) {
    const __m512 ab = halves(a.v, b.v), cd = halves(c.v, d.v);
    return {_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd))};
  }
  static F join(const F (&q)[4]) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(q[0].v, q[1].v, 0x44),
                                    _mm512_shuffle_f32x4(q[0].v, q[1].v, 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(q[2].v, q[3].v, 0x44),
                                    _mm512_shuffle_f32x4(q[2].v, q[3].v, 0xee));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd))};
  }
  static void transpose(F (&x)[16]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 4) {  // 4 x 4 within each 128 bits
      const __m512 a = _mm512_unpacklo_ps(x[i].v, x[i + 1].v), b = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
      const __m512 c = _mm512_unpacklo_ps(x[i + 2].v, x[i + 3].v);
      const __m512 d = _mm512_unpackhi_ps(x[i + 2].v, x[i + 3].v);
      t[i] = _mm512_shuffle_ps(a, c, 0x44), t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
      t[i + 2] = _mm512_shuffle_ps(b, d, 0x44), t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; i++) {  // 4 x 4 of the 128 bits
      const __m512 a = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x88);
      const __m512 b = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xdd);
      const __m512 c = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x88);
      const __m512 d = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xdd);
      x[i].v = _mm512_shuffle_f32x4(a, c, 0x88), x[8 + i].v = _mm512_shuffle_f32x4(a, c, 0xdd);
      x[4 + i].v = _mm512_shuffle_f32x4(b, d, 0x88), x[12 + i].v = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }

  static F keep(F x, int first, int last, F other) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 before_last = _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(last));
    return {_mm512_mask_blend_ps(_mm512_mask_cmpge_epi32_mask(before_last, lane, _mm512_set1_epi32(first)),
                                 other.v, x.v)};
  }

  struct Wide {
    __m512d low, high;
  };
  static void add(Wide &sums, F x) {
    sums.low = _mm512_add_pd(sums.low, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    sums.high = _mm512_add_pd(sums.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
  }
  static double sum(const Wide &sums) {
    double lanes[8], total = 0.0;
    _mm512_storeu_pd(lanes, _mm512_add_pd(sums.low, sums.high));
    for (double lane : lanes) total += lane;
    return total;
  }

 private:
  // In each 128 bits: a0 + a2, a1 + a3, b0 + b2, b1 + b3.
  static __m512 halves(__m512 a, __m512 b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_mask_blend_pd(0xaa, x, y)),
                         _mm512_castpd_ps(_mm512_shuffle_pd(x, y, 0x55)));
  }
};

inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }

}  // namespace

namespace avx512 {
#include "vector_functions.h"
}
}  // namespace llmr
