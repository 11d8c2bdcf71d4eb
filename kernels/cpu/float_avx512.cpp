#include "float.h"

#include <immintrin.h>

namespace llmr {
namespace {

using Vec = __m512;
using Splat = __m512;
using Words = __m512i;
using Table = __m512;

// 24 accumulators and 4 columns of the panels leave 4 registers; a table wants 3 of a panel more.
constexpr int TOKENS = 6;
constexpr int BLOCK = 128;  // 4 panels of them are 32 KB
constexpr int panels_at_once(bool is_lut, int tokens) { return is_lut && tokens > 3 ? 2 : 4; }

Vec zero() { return _mm512_setzero_ps(); }
Vec load(const float *p) { return _mm512_loadu_ps(p); }
void store(float *p, Vec v) { _mm512_storeu_ps(p, v); }
Splat splat(float f) { return _mm512_set1_ps(f); }
Vec load_half(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
Vec load_bf16(const uint16_t *p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
Words load_words(const uint8_t *p) { return _mm512_loadu_si512(p); }
Table load_table(const float *p) { return _mm512_loadu_ps(p); }
Vec fma(Splat x, Vec w, Vec acc) { return _mm512_fmadd_ps(x, w, acc); }
Vec scaled(Vec a, Vec b) { return _mm512_mul_ps(a, b); }

// A row's dword holds columns 0..3 in the low nibbles of its bytes and 4..7 in the high ones. The
// permutation looks at the lowest four bits only.
Vec look_up(const Table &table, const Words &words, int i) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 8 * (i & 3) + 4 * (i >> 2)), table);
}

#include "float_tiles.h"

}  // namespace

namespace avx512 {
void matmul_float(const llmr_weight *w, int p0, int p1, const float *x, int64_t ldx, int t0, int t1,
                  float *out, int64_t ldo, void *scratch) {
  multiply_any(w, p0, p1, x, ldx, t0, t1, out, ldo, scratch);
}
}  // namespace avx512
}  // namespace llmr
