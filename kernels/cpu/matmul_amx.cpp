// Integer matmul with AMX: a tile multiply gives 16 tokens x 16 rows in int32; each group is stored,
// scaled and added in fp32 by AVX512, while the tile unit works on the next.
//
// A tiles are activations, 16 tokens x up to 64 columns, so for many tokens the codes lie with a
// token's columns together: W4 [k/32][T][32]; W8 two planes, high and low bytes, [k/step][T][step] with
// step = min(64, group). B tiles are weights: the panel layout of W8 is that of a B tile already, W4 is
// opened once per panel and token block. With few tokens, or groups of 16 columns, everything is as in
// matmul_avx512.cpp; which of the two follows from Acts alone.
#include "matmul_amx.h"

#include <immintrin.h>

#include "avx512.h"
#include "matmul_avx512.h"

namespace llmr {
namespace amx {
namespace {

using avx512::lanes;
using avx512::largest_magnitude;
using avx512::load_mins;
using avx512::load_scales;
using avx512::usable;

constexpr int TOKENS = 16;      // of one tile
constexpr int AHEAD = 4;        // groups the tile unit works ahead of the folding: vector loads cannot
                                // take a tile from the store buffer, so it must have left it long ago
constexpr int SLACK = TOKENS * 64;  // tiles read whole rows of tokens behind the last

bool uses_tiles(const Acts &a) { return a.tokens > FEW_TOKENS && (a.group == 32 || a.group % 64 == 0); }

int step_of(const Acts &a) { return a.group < 64 ? a.group : 64; }

// The compiler knows nothing of what tile instructions read.
inline void fence() { __asm__ volatile("" ::: "memory"); }

// Registers 0..3: sums. 4, 5: A and B of 32 columns. 6, 7: of 64 columns.
// Each time: the caller's thread is not ours alone, and others release the tiles.
void configure() {
  alignas(64) struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 32, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 8, 16, 16};
  } config;
  __asm__ volatile("" ::"r"(&config) : "memory");  // gcc 12 would drop the stores: it sees 8 bytes used
  _tile_loadconfig(&config);
}

// Scales of 16 rows; of LUT8 with their unit.
inline __m512 full_scales(const llmr_weight &w, int64_t index) {
  const __m512 scales = load_scales(w, w.scales, index);
  return w.kind == LLMR_LUT8 ? _mm512_mul_ps(scales, _mm512_set1_ps(w.unit)) : scales;
}

// 16 tokens x 16 rows of fp32 sums and how they grow, group by group.
struct Block {
  const llmr_weight &w;
  const Acts &a;
  int p, t;    // panel, first token
  int64_t at;  // scales of the panel
  int shift;   // 2^shift activation groups share a scale

  template <bool MINS, bool HALVES>
  inline void fold(const Acts &a, const int32_t (*sums)[TOKENS][16], int g, __m512 *total) const {
    // Read where they are, also behind the last token: what comes of that is not written.
    const int64_t first = static_cast<int64_t>(g) * a.tokens + t;
    const float *scale = a.scale + first, *sum = a.sum + first;
    const int32_t *init = a.init + first;
    const int64_t index = at + static_cast<int64_t>(g >> shift) * ROWS;
    const __m512 ws = full_scales(w, index);
    const __m512 min = MINS ? load_mins(w, ws, index) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int i = 0; i < TOKENS; i++) {
      __m512i dot = _mm512_load_si512(sums[0][i]);
      if (HALVES) {
        dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 8), _mm512_load_si512(sums[1][i]));
        if (!MINS) dot = _mm512_add_epi32(dot, _mm512_set1_epi32(init[i]));
      }
      total[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(ws, _mm512_set1_ps(scale[i])), total[i]);
      if (MINS) total[i] = _mm512_fmadd_ps(min, _mm512_set1_ps(sum[i]), total[i]);
      __asm__ volatile("" : "+v"(total[i]));  // keeps the order: gcc would load all first, and spill
    }
  }
};

inline void write(const __m512 *total, int n, float *out, int64_t ldo) {
#pragma GCC unroll 16
  for (int i = 0; i < TOKENS; i++)
    if (i < n) _mm512_storeu_ps(out + i * ldo, total[i]);
}

// ---- W4 -----------------------------------------------------------------------------------------------

constexpr int OPEN_TILE = 512;  // bytes of 32 columns x 16 rows, one code a byte

// What each code of four bits is multiplied as.
inline __m128i levels_of(const llmr_weight &w) {
  if (w.kind == LLMR_LUT8) return _mm_loadu_si128(reinterpret_cast<const __m128i *>(w.levels));
  const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return w.mins != nullptr ? codes : _mm_sub_epi8(codes, _mm_set1_epi8(8));
}

// Codes of a panel as B tiles of levels.
void open_panel(const llmr_weight &w, int p, uint8_t *out) {
  const int groups = w.k_padded / W4_GROUP;
  const uint8_t *codes = w.codes + static_cast<int64_t>(p) * groups * 256;
  const __m512i mask = _mm512_set1_epi8(0x0f), levels = _mm512_broadcast_i32x4(levels_of(w));
  for (int i = 0; i < groups * 4; i++) {
    const __m512i both = _mm512_loadu_si512(codes + 64 * i);
    const __m512i low = _mm512_and_si512(both, mask), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    _mm512_store_si512(out + 128 * i, _mm512_shuffle_epi8(levels, low));
    _mm512_store_si512(out + 128 * i + 64, _mm512_shuffle_epi8(levels, high));
  }
}

template <bool MINS>
void w4_block(const Block &block, const uint8_t *weights, int n, float *out, int64_t ldo) {
  const Acts &a = block.a;
  const int groups = a.k_padded / W4_GROUP;
  const int64_t stride = static_cast<int64_t>(a.tokens) * W4_GROUP;
  const uint8_t *q = a.codes + static_cast<int64_t>(block.t) * W4_GROUP;
  alignas(64) int32_t sums[AHEAD][1][TOKENS][16];
  __m512 total[TOKENS];
#pragma GCC unroll 16
  for (int i = 0; i < TOKENS; i++) total[i] = _mm512_setzero_ps();
#define LLMR_MULTIPLY(c, g)                           \
  if ((g) < groups) {                                 \
    _tile_zero(c);                                    \
    _tile_loadd(4, q + (g) * stride, W4_GROUP);       \
    _tile_loadd(5, weights + (g) * OPEN_TILE, 64);    \
    if (MINS)                                         \
      _tile_dpbsud(c, 4, 5);                          \
    else                                              \
      _tile_dpbssd(c, 4, 5);                          \
  }
#define LLMR_STORE(c, g) \
  if ((g) < groups) _tile_stored(c, sums[c][0], 64);
#define LLMR_FOLD(c, next, after_next)                                            \
  if (g + c < groups) {                                                           \
    LLMR_MULTIPLY(after_next, g + c + 3)                                          \
    LLMR_STORE(next, g + c + 1)                                                   \
    block.fold<MINS, false>(a, sums[c], g + c, total);                            \
  }
  LLMR_MULTIPLY(0, 0)
  LLMR_MULTIPLY(1, 1)
  LLMR_MULTIPLY(2, 2)
  LLMR_STORE(0, 0)
  for (int g = 0; g < groups; g += AHEAD) {
    LLMR_FOLD(0, 1, 3)
    LLMR_FOLD(1, 2, 0)
    LLMR_FOLD(2, 3, 1)
    LLMR_FOLD(3, 0, 2)
  }
#undef LLMR_STORE
#undef LLMR_FOLD
#undef LLMR_MULTIPLY
  write(total, n, out, ldo);
}

// A refined group of up to 16 tokens, gathered. Few tokens refine the same group, so going through all
// of them would multiply mostly zeros.
struct Refined {
  uint8_t codes[TOKENS][W4_GROUP];
  float scale[TOKENS], sum[TOKENS];
  int32_t token[TOKENS];  // behind the first of the block
  int32_t g, n;
};

// Those of GATHER_TOKENS tokens, group after group.
struct RefinedBlock {
  int64_t n;
  Refined tiles[1];  // as many as there is room for
};

int64_t refined_block_bytes(int k_padded) {
  const int64_t most = static_cast<int64_t>(k_padded / W4_GROUP) * (GATHER_TOKENS / TOKENS);
  return (sizeof(RefinedBlock) + most * sizeof(Refined) + 63) / 64 * 64;
}

RefinedBlock &refined_block(const Acts &a, int t) {
  return *reinterpret_cast<RefinedBlock *>(a.gathered + t / GATHER_TOKENS * refined_block_bytes(a.k_padded));
}

// Adds the refined groups to the finished sums of a panel.
template <bool MINS>
void add_refined(const llmr_weight &w, int64_t at, int shift, const uint8_t *weights, const RefinedBlock &block,
                 float *out, int64_t ldo) {
  const Refined *tiles = block.tiles;
  const int n_tiles = static_cast<int>(block.n);
  alignas(64) int32_t sums[AHEAD][TOKENS][16];
  const auto multiply = [&](int i) {
    if (i >= n_tiles) return;
    _tile_zero(0);
    _tile_loadd(4, tiles[i].codes, W4_GROUP);
    _tile_loadd(5, weights + tiles[i].g * OPEN_TILE, 64);
    if (MINS)
      _tile_dpbsud(0, 4, 5);
    else
      _tile_dpbssd(0, 4, 5);
    _tile_stored(0, sums[i % AHEAD], 64);
  };
  for (int i = 0; i < AHEAD; i++) multiply(i);
  for (int i = 0; i < n_tiles; i++) {
    const Refined &tile = tiles[i];
    const int64_t index = at + static_cast<int64_t>(tile.g >> shift) * ROWS;
    const __m512 ws = full_scales(w, index);
    const __m512 min = MINS ? load_mins(w, ws, index) : _mm512_setzero_ps();
    for (int j = 0; j < tile.n; j++) {
      float *to = out + tile.token[j] * ldo;
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(sums[i % AHEAD][j]));
      __m512 total = _mm512_fmadd_ps(dot, _mm512_mul_ps(ws, _mm512_set1_ps(tile.scale[j])), _mm512_loadu_ps(to));
      if (MINS) total = _mm512_fmadd_ps(min, _mm512_set1_ps(tile.sum[j]), total);
      _mm512_storeu_ps(to, total);
    }
    multiply(i + AHEAD);
  }
}

// ---- W8 -----------------------------------------------------------------------------------------------

template <bool MINS>
void w8_block(const Block &block, int n, float *out, int64_t ldo) {
  const Acts &a = block.a;
  const int groups = a.k_padded / a.group, step = step_of(a), steps = a.group / step;
  const int64_t stride = static_cast<int64_t>(a.tokens) * step;
  const int64_t plane = static_cast<int64_t>(a.tokens) * a.k_padded + SLACK;
  const uint8_t *q = a.codes + static_cast<int64_t>(block.t) * step;
  const uint8_t *weights = block.w.codes + static_cast<int64_t>(block.p) * a.k_padded * ROWS;
  alignas(64) int32_t even[2][TOKENS][16], odd[2][TOKENS][16];
  __m512 total[TOKENS];
#pragma GCC unroll 16
  for (int i = 0; i < TOKENS; i++) total[i] = _mm512_setzero_ps();
#define LLMR_MULTIPLY(high, low, sums)                       \
  _tile_zero(high);                                          \
  _tile_zero(low);                                           \
  for (int s = 0; s < steps; s++) {                          \
    if (step == 64) {                                        \
      _tile_loadd(7, weights, 64);                           \
      _tile_loadd(6, q, 64);                                 \
      _tile_dpbsud(high, 6, 7);                              \
      _tile_loadd(6, q + plane, 64);                         \
      _tile_dpbsud(low, 6, 7);                               \
    } else {                                                 \
      _tile_loadd(5, weights, 64);                           \
      _tile_loadd(4, q, 32);                                 \
      _tile_dpbsud(high, 4, 5);                              \
      _tile_loadd(4, q + plane, 32);                         \
      _tile_dpbsud(low, 4, 5);                               \
    }                                                        \
    weights += step * ROWS;                                  \
    q += stride;                                             \
  }                                                          \
  _tile_stored(high, sums[0], 64);                           \
  _tile_stored(low, sums[1], 64)
  LLMR_MULTIPLY(0, 1, even);
  for (int g = 0; g < groups; g += 2) {
    if (g + 1 < groups) {
      LLMR_MULTIPLY(2, 3, odd);
    }
    block.fold<MINS, true>(a, even, g, total);
    if (g + 1 == groups) break;
    if (g + 2 < groups) {
      LLMR_MULTIPLY(0, 1, even);
    }
    block.fold<MINS, true>(a, odd, g + 1, total);
  }
#undef LLMR_MULTIPLY
  write(total, n, out, ldo);
}

void quantize_w8(const float *x, int t, Acts &a) {
  const int step = step_of(a);
  const int64_t plane = static_cast<int64_t>(a.tokens) * a.k_padded + SLACK;
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
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
      uint8_t *out = a.codes + (static_cast<int64_t>((first + i) / step) * a.tokens + t) * step + (first + i) % step;
      _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128(reinterpret_cast<__m128i *>(out + plane), _mm512_cvtepi32_epi8(q));
    }
    const int sum = _mm512_reduce_add_epi32(sums);
    const int64_t at = static_cast<int64_t>(g) * a.tokens + t;
    a.scale[at] = most < TINY ? 0.f : most / W8_LIMIT;
    a.sum[at] = a.scale[at] * static_cast<float>(sum);
    a.init[at] = static_cast<int32_t>(-128u * static_cast<uint32_t>(sum));
  }
}

}  // namespace

size_t codes_bytes(int kind, int tokens, int k_padded) {
  return avx512::codes_bytes(kind, tokens, k_padded) + 2 * SLACK;
}

size_t init_bytes(int kind, int tokens, int k_padded, int group) {
  return avx512::init_bytes(kind, tokens, k_padded, group);
}

void quantize(const float *x, int64_t ldx, int t0, int t1, Acts *acts) {
  if (acts->kind == LLMR_W4 || !uses_tiles(*acts)) {
    avx512::quantize(x, ldx, t0, t1, acts);
    return;
  }
  for (int t = t0; t < t1; t++) quantize_w8(x + (t - t0) * ldx, t, *acts);
}

size_t gathered_bytes(int tokens, int k_padded) {
  return (tokens + GATHER_TOKENS - 1) / GATHER_TOKENS * static_cast<size_t>(refined_block_bytes(k_padded));
}

void gather(const Acts *acts, int t0, int t1) {
  const Acts &a = *acts;
  RefinedBlock &block = refined_block(a, t0);
  block.n = 0;
  for (int word = 0; word < a.words; word++) {
    uint64_t any = 0;
    for (int t = t0; t < t1; t++) any |= a.refined[static_cast<int64_t>(t) * a.words + word];
    for (; any != 0; any &= any - 1) {
      const int bit = __builtin_ctzll(any), g = word * 64 + bit;
      Refined *tile = nullptr;
      for (int t = t0; t < t1; t++) {
        if ((a.refined[static_cast<int64_t>(t) * a.words + word] >> bit & 1) == 0) continue;
        if (tile == nullptr || tile->n == TOKENS) {
          tile = block.tiles + block.n++;
          tile->g = g;
          tile->n = 0;
        }
        const int64_t at = static_cast<int64_t>(g) * a.tokens + t;
        __builtin_memcpy(tile->codes[tile->n], a.fine->codes + at * W4_GROUP, W4_GROUP);
        tile->scale[tile->n] = a.fine->scale[at];
        tile->sum[tile->n] = a.fine->sum[at];
        tile->token[tile->n++] = t - t0;
      }
    }
  }
}

void matmul(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out, int64_t ldo,
            void *scratch) {
  const bool is_w4 = w->kind != LLMR_W8, mins = w->mins != nullptr;
  // The opened panel must fit; only a row of 130 thousand columns does not.
  const bool fits = !is_w4 || static_cast<size_t>(w->k_padded) * ROWS <= MATMUL_SCRATCH;
  if (!uses_tiles(*acts) || !fits || (acts->fine != nullptr && acts->gathered == nullptr)) {
    avx512::matmul(w, p0, p1, acts, t0, t1, out, ldo, scratch);
    return;
  }
  configure();
  const int shift = w->group == w->k_padded ? 31 : __builtin_ctz(w->group / acts->group);
  uint8_t *opened = static_cast<uint8_t *>(scratch);
  for (int p = p0; p < p1; p++) {
    const int64_t at = static_cast<int64_t>(p) * (w->k_padded / w->group) * ROWS;
    float *target = out + (p - p0) * ROWS;
    if (is_w4) open_panel(*w, p, opened);
    fence();
    for (int t = t0; t < t1; t += TOKENS) {
      const int n = t1 - t < TOKENS ? t1 - t : TOKENS;
      const Block block = {*w, *acts, p, t, at, shift};
      float *to = target + (t - t0) * ldo;
      if (is_w4)
        (mins ? w4_block<true> : w4_block<false>)(block, opened, n, to, ldo);
      else
        (mins ? w8_block<true> : w8_block<false>)(block, n, to, ldo);
    }
    for (int t = t0; acts->fine != nullptr && t < t1; t += GATHER_TOKENS) {
      const RefinedBlock &block = refined_block(*acts, t);
      if (block.n > 0)
        (mins ? add_refined<true> : add_refined<false>)(*w, at, shift, opened, block, target + (t - t0) * ldo, ldo);
    }
  }
}

}  // namespace amx
}  // namespace llmr
