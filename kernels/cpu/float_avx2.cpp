#include "float.h"

#include <immintrin.h>

namespace llmr {
namespace {

struct Vec {
  __m256 low, high;  // rows 0..7 and 8..15
};
struct Words {
  __m256i low, high;
};
struct Table {
  __m256 low, high;  // values 0..7 and 8..15
};
using Splat = __m256;

// 12 accumulators, a column and a broadcast value fill the 16 registers.
constexpr int TOKENS = 6;
constexpr int BLOCK = 256;  // 16 KB of one panel
constexpr int panels_at_once(bool is_lut, int tokens) {
  return tokens == 1 ? (is_lut ? 2 : 4) : tokens <= 3 && !is_lut ? 2 : 1;
}

Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
Vec load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
void store(float *p, Vec v) {
  _mm256_storeu_ps(p, v.low);
  _mm256_storeu_ps(p + 8, v.high);
}
Splat splat(float f) { return _mm256_set1_ps(f); }

__m128i eight_words(const uint16_t *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
Vec load_half(const uint16_t *p) {
  return {_mm256_cvtph_ps(eight_words(p)), _mm256_cvtph_ps(eight_words(p + 8))};
}
__m256 bf16_to_float(__m128i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
Vec load_bf16(const uint16_t *p) {
  return {bf16_to_float(eight_words(p)), bf16_to_float(eight_words(p + 8))};
}

Words load_words(const uint8_t *p) {
  const __m256i *words = reinterpret_cast<const __m256i *>(p);
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
Table load_table(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
Vec fma(Splat x, Vec w, Vec acc) {
  return {_mm256_fmadd_ps(x, w.low, acc.low), _mm256_fmadd_ps(x, w.high, acc.high)};
}
Vec scaled(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }

// A row's dword holds columns 0..3 in the low nibbles of its bytes and 4..7 in the high ones. The
// permutation looks at the lowest three bits, the blend at the sign, where the fourth is moved.
__m256 look_up_eight(const Table &table, __m256i words, int i) {
  const int shift = 8 * (i & 3) + 4 * (i >> 2);
  const __m256i index = _mm256_srli_epi32(words, shift);
  const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(words, 28 - shift));
  const __m256 low = _mm256_permutevar8x32_ps(table.low, index);
  const __m256 high = _mm256_permutevar8x32_ps(table.high, index);
  return _mm256_blendv_ps(low, high, fourth);
}
Vec look_up(const Table &table, const Words &words, int i) {
  return {look_up_eight(table, words.low, i), look_up_eight(table, words.high, i)};
}

#include "float_tiles.h"

}  // namespace

namespace avx2 {
void matmul_float(const llmr_weight *w, int p0, int p1, const float *x, int64_t ldx, int t0, int t1,
                  float *out, int64_t ldo, void *scratch) {
  multiply_any(w, p0, p1, x, ldx, t0, t1, out, ldo, scratch);
}
}  // namespace avx2
}  // namespace llmr
