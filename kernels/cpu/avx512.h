// Pieces that the AVX512 and AMX matmul share. Internal linkage: each file keeps its own copy.
#pragma once
#include <immintrin.h>

#include "matmul.h"

namespace llmr {
namespace avx512 {
namespace {

inline __m512 load_scales(const llmr_weight &w, const void *scales, int64_t index) {
  if (w.type == LLMR_F32) return _mm512_loadu_ps(static_cast<const float *>(scales) + index);
  const __m256i half = _mm256_loadu_si256(
      reinterpret_cast<const __m256i *>(static_cast<const uint16_t *>(scales) + index));
  if (w.type == LLMR_F16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Minima of rows with these scales.
inline __m512 load_mins(const llmr_weight &w, __m512 scales, int64_t index) {
  if (w.min_type != LLMR_U8) return load_scales(w, w.mins, index);
  const __m128i zeros = _mm_loadu_si128(reinterpret_cast<const __m128i *>(static_cast<const uint8_t *>(w.mins) + index));
  const __m512 product = _mm512_mul_ps(scales, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zeros)));
  return _mm512_xor_ps(product, _mm512_set1_ps(-0.f));
}

inline __mmask16 lanes(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// Compared as integers, in which a NaN is larger than infinity.
inline float largest_magnitude(const float *x, int n) {
  __m512i most = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 16)
    most = _mm512_max_epi32(most, _mm512_castps_si512(_mm512_abs_ps(_mm512_maskz_loadu_ps(lanes(n - i), x + i))));
  const int32_t bits = _mm512_reduce_max_epi32(most);
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline bool usable(float most) { return most >= TINY && most <= __FLT_MAX__; }

}  // namespace
}  // namespace avx512
}  // namespace llmr
