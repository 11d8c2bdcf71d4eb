// Integer matmul with AVX512-VNNI: a zmm register holds 16 rows x 4 columns of weights, `vpdpbusd` adds
// four products to each of 16 int32 lanes, one lane a row. No std headers here (see kernels.h).
//
// Activations: W4 int8 [k/32][T][32]; init [k/32][T] = -8 * sum of the codes. LUT8 looks its levels up with
// 128 added, so that they are unsigned, and starts at 16 * init.
// W8 16 bits split in signed bytes, code = 256 * high + low: [k/4][T][high 4, low 4], so that one
// token's eight bytes lie together; init [k/group][T] = -128 * sum of the codes.
#include <immintrin.h>

#include "avx512.h"
#include "matmul.h"
#include "matmul_avx512.h"
#include "refine.h"

namespace llmr {
namespace avx512 {
namespace {

inline __m512i broadcast(const void *four_bytes) {
  int32_t word;
  __builtin_memcpy(&word, four_bytes, 4);
  return _mm512_set1_epi32(word);
}

// ---- quantization of activations --------------------------------------------------------------------

struct Row32 {  // a group of 32 columns
  __m512 first, second;
};

inline Row32 load32(const float *x, int n) {
  return {_mm512_maskz_loadu_ps(lanes(n), x), _mm512_maskz_loadu_ps(lanes(n - 16), x + 16)};
}

inline float largest_magnitude(const Row32 &v) {
  const __m512i most = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(v.first)), _mm512_castps_si512(_mm512_abs_ps(v.second)));
  const int32_t bits = _mm512_reduce_max_epi32(most);
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Writes codes, scale, sum and start value of group g of token t; returns what the codes stand for.
inline Row32 write_group(const Row32 &v, float most, int g, int t, Acts &a) {
  const bool is_usable = usable(most);
  const __mmask16 all = is_usable ? 0xffff : 0;
  const float scale = most < TINY ? 0.f : most / 127.f;
  const __m512 factor = _mm512_set1_ps(is_usable ? 127.f / most : 0.f);
  const __m512i q0 = _mm512_maskz_cvtps_epi32(all, _mm512_mul_ps(v.first, factor));
  const __m512i q1 = _mm512_maskz_cvtps_epi32(all, _mm512_mul_ps(v.second, factor));
  const int64_t at = static_cast<int64_t>(g) * a.tokens + t;
  __m128i *codes = reinterpret_cast<__m128i *>(a.codes + at * W4_GROUP);
  _mm_storeu_si128(codes, _mm512_cvtepi32_epi8(q0));
  _mm_storeu_si128(codes + 1, _mm512_cvtepi32_epi8(q1));
  const int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1));
  a.scale[at] = scale;
  a.sum[at] = scale * static_cast<float>(sum);
  a.init[at] = -8 * sum;
  const __m512 s = _mm512_set1_ps(scale);
  return {_mm512_mul_ps(_mm512_cvtepi32_ps(q0), s), _mm512_mul_ps(_mm512_cvtepi32_ps(q1), s)};
}

void quantize_w4(const float *x, int t, Acts &a) {
  const int groups = a.k_padded / W4_GROUP;
  uint64_t *refined = a.fine == nullptr ? nullptr : a.refined + static_cast<int64_t>(t) * a.words;
  for (int i = 0; refined != nullptr && i < a.words; i++) refined[i] = 0;
  if (refined == nullptr) {
    for (int g = 0; g < groups; g++) {
      const Row32 v = load32(x + g * W4_GROUP, a.k - g * W4_GROUP);
      write_group(v, largest_magnitude(v), g, t, a);
    }
    return;
  }
  float most[MOST_GROUPS];
  RefineLimit limit;
  for (int g = 0; g < groups; g++) {
    most[g] = largest_magnitude(load32(x + g * W4_GROUP, a.k - g * W4_GROUP));
    limit.see(most[g] < TINY ? 0.f : most[g] / 127.f);
  }
  const int64_t typical = limit.value();
  for (int g = 0; g < groups; g++) {
    const Row32 v = load32(x + g * W4_GROUP, a.k - g * W4_GROUP);
    const Row32 coded = write_group(v, most[g], g, t, a);
    const int64_t at = static_cast<int64_t>(g) * a.tokens + t;
    if (!RefineLimit::exceeded(a.scale[at], typical)) {
      a.fine->scale[at] = 0;
      a.fine->sum[at] = 0;
      continue;
    }
    refined[g / 64] |= uint64_t{1} << g % 64;
    const Row32 left = {_mm512_sub_ps(v.first, coded.first), _mm512_sub_ps(v.second, coded.second)};
    write_group(left, largest_magnitude(left), g, t, *a.fine);
  }
}

void quantize_w8(const float *x, int t, Acts &a) {
  for (int g = 0; g < a.k_padded / a.group; g++) {
    const int first = g * a.group;
    int n = a.k - first < a.group ? (a.k > first ? a.k - first : 0) : a.group;
    const float most = largest_magnitude(x + first, n);
    if (!usable(most)) n = 0;
    const __m512 factor = _mm512_set1_ps(n > 0 ? W8_LIMIT / most : 0.f);
    __m512i sums = _mm512_setzero_si512();
    for (int i = 0; i < a.group; i += 16) {
      const __m512 v = _mm512_maskz_loadu_ps(lanes(n - i), x + first + i);
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v, factor));
      sums = _mm512_add_epi32(sums, q);
      // The low byte is signed, so the high one takes its carry.
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
      const __m128i h = _mm512_cvtepi32_epi8(high), l = _mm512_cvtepi32_epi8(q);
      const __m128i a01 = _mm_unpacklo_epi32(h, l), a23 = _mm_unpackhi_epi32(h, l);
      uint8_t *out = a.codes + (static_cast<int64_t>((first + i) / 4) * a.tokens + t) * 8;
      const int64_t stride = static_cast<int64_t>(a.tokens) * 8;
      _mm_storel_epi64(reinterpret_cast<__m128i *>(out), a01);
      _mm_storel_epi64(reinterpret_cast<__m128i *>(out + stride), _mm_unpackhi_epi64(a01, a01));
      _mm_storel_epi64(reinterpret_cast<__m128i *>(out + 2 * stride), a23);
      _mm_storel_epi64(reinterpret_cast<__m128i *>(out + 3 * stride), _mm_unpackhi_epi64(a23, a23));
    }
    const int sum = _mm512_reduce_add_epi32(sums);
    const int64_t at = static_cast<int64_t>(g) * a.tokens + t;
    a.scale[at] = most < TINY ? 0.f : most / W8_LIMIT;
    a.sum[at] = a.scale[at] * static_cast<float>(sum);
    a.init[at] = static_cast<int32_t>(-128u * static_cast<uint32_t>(sum));
  }
}

// ---- W4 -----------------------------------------------------------------------------------------------

constexpr int PREFETCH = 2048;  // bytes ahead: while a few tokens pass, weights come from memory, and the
                                // hardware alone keeps a half of the bandwidth unused beside this much arithmetic
constexpr int TILE = 256;  // bytes of 32 columns of a panel

// What becomes of W4's codes: less 8, as they are beside minima, or looked up.
enum Codes { MIDDLE, MINS, LEVELS };

inline Codes codes_of(const llmr_weight &w) { return w.kind == LLMR_LUT8 ? LEVELS : w.mins != nullptr ? MINS : MIDDLE; }

// PANELS panels x T tokens: all groups, then the n_refined groups in `refined` of a.fine.
template <int PANELS, int T, Codes CODES>
void w4_tile(const llmr_weight &w, int p, const Acts &acts, int t, const int32_t *refined, int n_refined,
             float *out, int64_t ldo) {
  const int groups = w.k_padded / W4_GROUP, per = w.group / W4_GROUP, scale_groups = w.k_padded / w.group;
  const __m512i mask = _mm512_set1_epi8(0x0f);
  __m512i levels;
  if (CODES == LEVELS)
    levels = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w.levels))),
                              _mm512_set1_epi8(-128));
  __m512 total[PANELS][T];
  for (int r = 0; r < PANELS; r++)
    for (int i = 0; i < T; i++) total[r][i] = _mm512_setzero_ps();
  int scale_group = 0, until_next = per;
  for (int n = 0; n < groups + n_refined; n++) {
    const bool is_fine = n >= groups;
    const Acts &a = is_fine ? *acts.fine : acts;
    const int g = is_fine ? refined[n - groups] : n;
    if (is_fine) scale_group = g / per;
    const int64_t first = static_cast<int64_t>(g) * a.tokens + t;
    const int8_t *q = reinterpret_cast<const int8_t *>(a.codes) + first * W4_GROUP;
    const uint8_t *codes = w.codes + (static_cast<int64_t>(p) * groups + g) * TILE;
    const int64_t panel = static_cast<int64_t>(groups) * TILE;
    __m512i dot[PANELS][T];
#pragma GCC unroll 16
    for (int i = 0; i < T; i++)
#pragma GCC unroll 4
      for (int r = 0; r < PANELS; r++) {
        dot[r][i] = CODES == MINS ? _mm512_setzero_si512() : _mm512_set1_epi32(a.init[first + i]);
        if (CODES == LEVELS) dot[r][i] = _mm512_slli_epi32(dot[r][i], 4);
      }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m512i low[PANELS], high[PANELS];
#pragma GCC unroll 4
      for (int r = 0; r < PANELS; r++) {
        const __m512i both = _mm512_loadu_si512(codes + r * panel + 64 * j);
        if (T <= FEW_TOKENS) _mm_prefetch(reinterpret_cast<const char *>(codes + r * panel + 64 * j + PREFETCH), _MM_HINT_T0);
        low[r] = _mm512_and_si512(both, mask);
        high[r] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        if (CODES == LEVELS) {
          low[r] = _mm512_shuffle_epi8(levels, low[r]);
          high[r] = _mm512_shuffle_epi8(levels, high[r]);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < T; i++) {
        const __m512i first_four = broadcast(q + 32 * i + 8 * j), next_four = broadcast(q + 32 * i + 8 * j + 4);
#pragma GCC unroll 4
        for (int r = 0; r < PANELS; r++) {
          dot[r][i] = _mm512_dpbusd_epi32(dot[r][i], low[r], first_four);
          dot[r][i] = _mm512_dpbusd_epi32(dot[r][i], high[r], next_four);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < PANELS; r++) {
      const int64_t at = (static_cast<int64_t>(p + r) * scale_groups + scale_group) * ROWS;
      __m512 scale = load_scales(w, w.scales, at);
      if (CODES == LEVELS) scale = _mm512_mul_ps(scale, _mm512_set1_ps(w.unit));
      const __m512 min = CODES == MINS ? load_mins(w, scale, at) : _mm512_setzero_ps();
#pragma GCC unroll 16
      for (int i = 0; i < T; i++) {
        const __m512 s = _mm512_mul_ps(scale, _mm512_set1_ps(a.scale[first + i]));
        total[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][i]), s, total[r][i]);
        if (CODES == MINS) total[r][i] = _mm512_fmadd_ps(min, _mm512_set1_ps(a.sum[first + i]), total[r][i]);
      }
    }
    if (--until_next == 0) {
      until_next = per;
      scale_group++;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < T; i++)
#pragma GCC unroll 4
    for (int r = 0; r < PANELS; r++) _mm512_storeu_ps(out + i * ldo + r * ROWS, total[r][i]);
}

// ---- W8 -----------------------------------------------------------------------------------------------

template <int PANELS, int T, Codes CODES>
void w8_tile(const llmr_weight &w, int p, const Acts &a, int t, const int32_t *, int, float *out, int64_t ldo) {
  const int groups = w.k_padded / a.group, steps = a.group / 4;
  const int shift = w.group / a.group ? w.group / a.group : 1;
  const int64_t stride = static_cast<int64_t>(a.tokens) * 8;
  const int scale_groups = w.k_padded / w.group;
  const uint8_t *codes[PANELS];
  int64_t at[PANELS];
  __m512 total[PANELS][T];
  for (int r = 0; r < PANELS; r++) {
    codes[r] = w.codes + static_cast<int64_t>(p + r) * w.k_padded * ROWS;
    at[r] = static_cast<int64_t>(p + r) * scale_groups * ROWS;
    for (int i = 0; i < T; i++) total[r][i] = _mm512_setzero_ps();
  }
  const uint8_t *q = a.codes + static_cast<int64_t>(t) * 8;
  int until_next = shift;
  for (int g = 0; g < groups; g++) {
    const int64_t first = static_cast<int64_t>(g) * a.tokens + t;
    __m512i high[PANELS][T], low[PANELS][T];
#pragma GCC unroll 16
    for (int i = 0; i < T; i++)
#pragma GCC unroll 4
      for (int r = 0; r < PANELS; r++) {
        high[r][i] = _mm512_setzero_si512();
        low[r][i] = CODES == MINS ? _mm512_setzero_si512() : _mm512_set1_epi32(a.init[first + i]);
      }
#pragma GCC unroll 2
    for (int j = 0; j < steps; j++) {
      __m512i weights[PANELS];
#pragma GCC unroll 4
      for (int r = 0; r < PANELS; r++) {
        weights[r] = _mm512_loadu_si512(codes[r]);
        if (T <= FEW_TOKENS) _mm_prefetch(reinterpret_cast<const char *>(codes[r] + PREFETCH), _MM_HINT_T0);
        codes[r] += 64;
      }
#pragma GCC unroll 16
      for (int i = 0; i < T; i++) {
        const __m512i upper = broadcast(q + 8 * i), lower = broadcast(q + 8 * i + 4);
#pragma GCC unroll 4
        for (int r = 0; r < PANELS; r++) {
          high[r][i] = _mm512_dpbusd_epi32(high[r][i], weights[r], upper);
          low[r][i] = _mm512_dpbusd_epi32(low[r][i], weights[r], lower);
        }
      }
      q += stride;
    }
#pragma GCC unroll 4
    for (int r = 0; r < PANELS; r++) {
      const __m512 scale = load_scales(w, w.scales, at[r]);
      const __m512 min = CODES == MINS ? load_mins(w, scale, at[r]) : _mm512_setzero_ps();
#pragma GCC unroll 16
      for (int i = 0; i < T; i++) {
        const __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(high[r][i], 8), low[r][i]);
        const __m512 s = _mm512_mul_ps(scale, _mm512_set1_ps(a.scale[first + i]));
        total[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), s, total[r][i]);
        if (CODES == MINS) total[r][i] = _mm512_fmadd_ps(min, _mm512_set1_ps(a.sum[first + i]), total[r][i]);
      }
    }
    if (--until_next == 0) {
      until_next = shift;
      for (int r = 0; r < PANELS; r++) at[r] += ROWS;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < T; i++)
#pragma GCC unroll 4
    for (int r = 0; r < PANELS; r++) _mm512_storeu_ps(out + i * ldo + r * ROWS, total[r][i]);
}

// ---- choosing tiles -------------------------------------------------------------------------------------

using Tile = void (*)(const llmr_weight &, int, const Acts &, int, const int32_t *, int, float *, int64_t);

// Widths that keep accumulators, weights and a broadcast in 32 registers: T x 2 + 3 for W4 (int and
// fp32 sums), T x 3 + 2 for W8 (two int sums).
constexpr int W4_WIDEST = 12, W8_WIDEST = 9;

#define LLMR_TILES(name, codes)                                                                            \
  {name<1, 1, codes>, name<1, 2, codes>, name<1, 3, codes>, name<1, 4, codes>,  name<1, 5, codes>,  name<1, 6, codes>, \
   name<1, 7, codes>, name<1, 8, codes>, name<1, 9, codes>, name<1, 10, codes>, name<1, 11, codes>, name<1, 12, codes>}
constexpr Tile W4_TILES[3][12] = {LLMR_TILES(w4_tile, MIDDLE), LLMR_TILES(w4_tile, MINS), LLMR_TILES(w4_tile, LEVELS)};
#undef LLMR_TILES
#define LLMR_TILES(name, codes)                                                                         \
  {name<1, 1, codes>, name<1, 2, codes>, name<1, 3, codes>, name<1, 4, codes>, name<1, 5, codes>, name<1, 6, codes>, \
   name<1, 7, codes>, name<1, 8, codes>, name<1, 9, codes>}
constexpr Tile W8_TILES[2][9] = {LLMR_TILES(w8_tile, MIDDLE), LLMR_TILES(w8_tile, MINS)};
#undef LLMR_TILES

// One to three tokens are bound by memory and by the latency of dependent sums: several panels at a
// time. [codes][panels / 2 - 1][tokens - 1]
constexpr int FEW = 3;
#define LLMR_TILES(codes)                                                  \
  {{w4_tile<2, 1, codes>, w4_tile<2, 2, codes>, w4_tile<2, 3, codes>},     \
   {w4_tile<4, 1, codes>, w4_tile<4, 2, codes>, w4_tile<4, 3, codes>}}
constexpr Tile W4_FEW[3][2][FEW] = {LLMR_TILES(MIDDLE), LLMR_TILES(MINS), LLMR_TILES(LEVELS)};
#undef LLMR_TILES
#define LLMR_TILES(codes)                                                  \
  {{w8_tile<2, 1, codes>, w8_tile<2, 2, codes>, w8_tile<2, 3, codes>},     \
   {w8_tile<4, 1, codes>, w8_tile<4, 2, codes>, w8_tile<2, 3, codes>}}
constexpr Tile W8_FEW[2][2][FEW] = {LLMR_TILES(MIDDLE), LLMR_TILES(MINS)};
#undef LLMR_TILES

void few_tokens(const llmr_weight &w, int p0, int p1, const Acts &a, int t, int n, float *out, int64_t ldo) {
  const bool is_w4 = w.kind != LLMR_W8;
  const Codes codes = codes_of(w);
  const auto &wide = is_w4 ? W4_FEW[codes] : W8_FEW[codes];
  int32_t refined[MOST_GROUPS];
  const int n_refined = refined_groups(a, t, t + n, refined);
  int p = p0;
  if (is_w4 || n < 3)
    for (; p + 4 <= p1; p += 4) wide[1][n - 1](w, p, a, t, refined, n_refined, out + (p - p0) * ROWS, ldo);
  for (; p + 2 <= p1; p += 2) wide[0][n - 1](w, p, a, t, refined, n_refined, out + (p - p0) * ROWS, ldo);
  const Tile one = (is_w4 ? W4_TILES[codes] : W8_TILES[codes])[n - 1];
  if (p < p1) one(w, p, a, t, refined, n_refined, out + (p - p0) * ROWS, ldo);
}

}  // namespace

size_t codes_bytes(int kind, int tokens, int k_padded) {
  return static_cast<size_t>(tokens) * k_padded * (kind == LLMR_W4 ? 1 : 2);
}

size_t init_bytes(int, int tokens, int k_padded, int group) {
  return sizeof(int32_t) * (k_padded / group) * static_cast<size_t>(tokens);
}

void quantize(const float *x, int64_t ldx, int t0, int t1, Acts *acts) {
  for (int t = t0; t < t1; t++) {
    const float *row = x + (t - t0) * ldx;
    acts->kind == LLMR_W4 ? quantize_w4(row, t, *acts) : quantize_w8(row, t, *acts);
  }
}

void matmul(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out, int64_t ldo,
            void *) {
  const bool is_w4 = w->kind != LLMR_W8;
  const Codes codes = codes_of(*w);
  const int tokens = t1 - t0;
  if (tokens <= FEW) {
    few_tokens(*w, p0, p1, *acts, t0, tokens, out, ldo);
    return;
  }
  const int widest = is_w4 ? W4_WIDEST : W8_WIDEST;
  const int tiles = (tokens + widest - 1) / widest;  // of near-equal width: time grows evenly with tokens
  for (int i = 0; i < tiles; i++) {
    const int from = tokens * i / tiles, to = tokens * (i + 1) / tiles;
    const Tile tile = (is_w4 ? W4_TILES[codes] : W8_TILES[codes])[to - from - 1];
    int32_t refined[MOST_GROUPS];
    const int n_refined = refined_groups(*acts, t0 + from, t0 + to, refined);
    for (int p = p0; p < p1; p++)
      tile(*w, p, *acts, t0 + from, refined, n_refined, out + from * ldo + (p - p0) * ROWS, ldo);
  }
}

}  // namespace avx512
}  // namespace llmr
