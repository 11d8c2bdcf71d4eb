// What AVX2 and AVX-VNNI share: the layout of activations, quantization, the loops around a kernel,
// and the kernel in intrinsics. Everything is in an anonymous namespace; only ISA files include it.
//
// A kernel takes one panel beside 2 to WIDEST tokens, or one or two panels beside one token. Tokens are
// split evenly into tiles of at most WIDEST. Codes of a tile lie together, in blocks that stand beside
// 256 bytes of a panel: [tile][block][token of the tile][32 bytes].
//   W4   32 int8 in order
//   W8   16 int16, of each four in the order 0 2 1 3: weight bytes are split into even and odd ones
// init is [k_padded/group][tokens] int32, what integer sums start at so that the zero point of the
// weights comes off: -128 * sum of the codes (W8), -8 * sum (W4, AVX-VNNI), or two int16 (W4, AVX2):
// -8 * the sum over k % 4 = 0, 1 and over k % 4 = 2, 3. LUT8 takes W4's, and makes of it what it needs.
#pragma once
#include <immintrin.h>

#include "matmul.h"

#define LLMR_UNROLL _Pragma("GCC unroll 16")

namespace llmr {
namespace {

constexpr int FEW = 4, AHEAD = 2048;         // as in generate.py: weights of a few tokens are fetched ahead
constexpr int WIDEST = 5;                    // tokens of a tile
constexpr int BLOCK = 256;                   // bytes of a panel
constexpr int TOKEN = 32;                    // bytes of a token's codes beside them
constexpr int RUN_COLUMNS = 1024;            // a kernel walks before it turns to the next panel
constexpr int64_t WEIGHT_BYTES = 256 << 10;  // of the panels that all tiles pass before the next: in L2

// Everything a kernel reads, and where it adds to: acc, fp32 [tokens][16] or [panels][16], is carried in
// and out. It walks `outer` weight groups of `inner` activation groups of `blocks` blocks.
struct Walk {
  const uint8_t *w;        // weights: first block of the first panel
  int64_t w_panel;         // bytes from one panel to the next
  const uint8_t *x;        // codes of the first token
  int64_t x_step;          // bytes from block to block
  const int32_t *init;     // of the first token; not read with mins
  const float *scale;      // of the first token
  const float *sum;        // of the first token; read with mins
  int64_t step;            // bytes from group to group of init, scale and sum
  const uint8_t *ws, *wm;  // scales and minima of the rows
  int64_t s_panel;         // bytes from one panel's scales to the next
  int64_t m_panel;         // the same of minima
  const llmr_weight *weight;
  uint8_t levels[16], lower[16];  // LUT8, for generate.py: what is looked up
  float unit;
  int64_t blocks, inner, outer;
  float *acc;
};

using Kernel = void (*)(Walk);

// First token of tile i of n.
int tile_start(int tokens, int n, int i) { return int(int64_t(tokens) * i / n); }
int tile_count(int tokens) { return (tokens + WIDEST - 1) / WIDEST; }
int least(int a, int b) { return a < b ? a : b; }
int most(int a, int b) { return a > b ? a : b; }

int code_bytes(int kind) { return kind == LLMR_W4 ? 1 : 2; }  // of an activation
int type_bytes(int type) { return type == LLMR_F32 ? 4 : type == LLMR_U8 ? 1 : 2; }

// ---- quantization ---------------------------------------------------------------------------------

int32_t add_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// Largest magnitude of n values, n % 8 == 0. Compared as integers, so that a NaN is above all.
float absmax(const float *x, int n) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i m = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 8) {
    m = _mm256_max_epi32(m, _mm256_and_si256(magnitude, _mm256_loadu_si256((const __m256i *)(x + i))));
  }
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(s));
}

// 16 codes as int16. Lanes of a pack are interleaved; the permutation puts them in order.
__m256i codes16(const float *x, __m256 inverse) {
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), inverse));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
}

struct Sums {
  int32_t first, second;  // over k % 4 = 0, 1 and over k % 4 = 2, 3
};

// 32 int8 codes of a group, at x.
Sums store_w4(const float *x, __m256 inverse, uint8_t *codes) {
  const __m256i a = codes16(x, inverse), b = codes16(x + 16, inverse);
  _mm256_storeu_si256((__m256i *)codes, _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8));
  const __m256i pairs = _mm256_add_epi16(a, b);
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i both = _mm256_madd_epi16(pairs, ones);  // even lanes: k % 4 = 0, 1
  const int32_t first = add_lanes(_mm256_and_si256(both, _mm256_set1_epi64x(0xffffffff)));
  return {first, add_lanes(_mm256_srli_epi64(both, 32))};
}

// n int16 codes of a group, in blocks `step` bytes apart.
Sums store_w8(const float *x, int n, __m256 inverse, uint8_t *codes, int64_t step) {
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 16) {
    __m256i q = codes16(x + i, inverse);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(q, _mm256_set1_epi16(1)));
    q = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(q, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i *)(codes + i / 16 * step), q);
  }
  return {add_lanes(sum), 0};
}

// One token. codes: of the token, blocks `step` bytes apart. INT16: init of W4 is two int16.
template <bool INT16>
void quantize_token(const float *x, int t, uint8_t *codes, int64_t step, Acts *acts) {
  const bool w4 = acts->kind == LLMR_W4;
  const float largest = w4 ? 127.f : float(W8_LIMIT);
  for (int g = 0; g < acts->k_padded / acts->group; g++) {
    const int k0 = g * acts->group;
    const float *group = x + k0;
    alignas(32) float tail[W8_GROUP];
    if (k0 + acts->group > acts->k) {
      for (int i = 0; i < acts->group; i++) tail[i] = k0 + i < acts->k ? group[i] : 0.f;
      group = tail;
    }
    const float top = absmax(group, acts->group);
    const bool usable = top >= TINY && top <= __FLT_MAX__;
    if (!usable) {
      for (int i = 0; i < acts->group; i++) tail[i] = 0;
      group = tail;
    }
    const __m256 inverse = _mm256_set1_ps(usable ? largest / top : 0.f);
    const Sums sums =
        w4 ? store_w4(group, inverse, codes) : store_w8(group, acts->group, inverse, codes, step);
    codes += step * acts->group * code_bytes(acts->kind) / TOKEN;

    const int32_t total = sums.first + sums.second;
    const int64_t a = int64_t(g) * acts->tokens + t;
    acts->scale[a] = top < TINY ? 0 : top / largest;
    acts->sum[a] = acts->scale[a] * float(total);
    const uint32_t halves = uint32_t(-8 * sums.second) << 16 | (uint32_t(-8 * sums.first) & 0xffff);
    acts->init[a] = !w4 ? -128 * total : INT16 ? int32_t(halves) : -8 * total;
  }
}

template <bool INT16>
void quantize_tokens(const float *x, int64_t ldx, int t0, int t1, Acts *acts) {
  const int n = tile_count(acts->tokens);
  for (int i = 0; i < n; i++) {
    const int start = tile_start(acts->tokens, n, i), end = tile_start(acts->tokens, n, i + 1);
    uint8_t *codes = acts->codes + int64_t(start) * acts->k_padded * code_bytes(acts->kind);
    for (int t = most(t0, start); t < least(t1, end); t++) {
      quantize_token<INT16>(x + (t - t0) * ldx, t, codes + TOKEN * (t - start), TOKEN * (end - start), acts);
    }
  }
  _mm256_zeroupper();
}

// ---- loops around a kernel ------------------------------------------------------------------------

// A tile of tokens, or the part of one that is asked for, beside a weight. `fine`: the same tokens in
// acts->fine, of which the n_refined groups in `refined` are added behind all others.
struct Tile {
  const llmr_weight *w;
  const Acts *acts;
  int tokens;
  const uint8_t *codes;  // of its first token, first block
  int width;             // tokens of the whole tile
  int first;             // token of the step
  const Tile *fine;
  const int32_t *refined;
  int n_refined;
};

// The walk through activation groups g0..g1 of a panel and those behind it.
template <class Isa>
Walk walk_of(const Tile &tile, int panel, int g0, int g1, float *acc) {
  const llmr_weight &w = *tile.w;
  const Acts &a = *tile.acts;
  const int per = w.group / a.group;  // activation groups of a weight group
  const int64_t first_block = int64_t(g0) * a.group * code_bytes(a.kind) / TOKEN;
  const int64_t element = type_bytes(w.type);
  const int64_t scales = int64_t(w.k_padded / w.group) * ROWS;  // of a panel
  const int64_t min_element = w.mins ? type_bytes(w.min_type) : 0;
  const int64_t from = panel * scales + int64_t(g0 / per) * ROWS;
  const int64_t at = int64_t(g0) * a.tokens + tile.first;

  Walk walk = {};
  walk.w_panel = int64_t(w.k_padded) * code_bytes(a.kind) / TOKEN * BLOCK;
  walk.w = w.codes + panel * walk.w_panel + first_block * BLOCK;
  walk.x_step = TOKEN * tile.width;
  walk.x = tile.codes + first_block * walk.x_step;
  walk.init = a.init + at;
  walk.scale = a.scale + at;
  walk.sum = a.sum + at;
  walk.step = int64_t(a.tokens) * 4;
  walk.ws = (const uint8_t *)w.scales + from * element;
  if (w.mins) walk.wm = (const uint8_t *)w.mins + from * min_element;
  walk.s_panel = scales * element;
  walk.m_panel = scales * min_element;
  walk.weight = &w;
  if (w.kind == LLMR_LUT8) Isa::look_up(w, walk);
  walk.blocks = a.group * code_bytes(a.kind) / TOKEN;
  walk.inner = least(per, g1 - g0);  // a run never crosses into a part of a weight group
  walk.outer = (g1 - g0) / walk.inner;
  walk.acc = acc;
  return walk;
}

// One token beside panels p0..p1, Isa::PANELS at a time over all columns.
template <class Isa>
void gemv(const Tile &tile, int p0, int p1, float *out) {
  const int groups = tile.acts->k_padded / tile.acts->group;
  for (int i = 0; i < ROWS * (p1 - p0); i++) out[i] = 0;
  for (int p = p0; p < p1;) {
    const int panels = least(Isa::panels(*tile.w), p1 - p);
    const Kernel kernel = Isa::gemv(*tile.w, panels);
    float *to = out + ROWS * (p - p0);
    kernel(walk_of<Isa>(tile, p, 0, groups, to));
    for (int i = 0; i < tile.n_refined; i++) {
      kernel(walk_of<Isa>(*tile.fine, p, tile.refined[i], tile.refined[i] + 1, to));
    }
    p += panels;
  }
}

// Several tokens, in runs of columns whose codes stay in L1. Between them sums rest in out.
template <class Isa>
void gemm(const Tile &tile, int p0, int p1, float *out, int64_t ldo) {
  const Kernel kernel = Isa::gemm(*tile.w, tile.tokens);
  const int groups = tile.acts->k_padded / tile.acts->group;
  const int run = most(1, RUN_COLUMNS / tile.acts->group);
  for (int g = 0; g < groups; g += run) {
    for (int p = p0; p < p1; p++) {
      alignas(64) __m256 acc[WIDEST][2];
      float *to = out + ROWS * (p - p0);
      for (int t = 0; t < tile.tokens; t++) {
        acc[t][0] = g == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(to + t * ldo);
        acc[t][1] = g == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(to + t * ldo + 8);
      }
      kernel(walk_of<Isa>(tile, p, g, least(g + run, groups), (float *)acc));
      for (int i = 0; g + run >= groups && i < tile.n_refined; i++) {
        kernel(walk_of<Isa>(*tile.fine, p, tile.refined[i], tile.refined[i] + 1, (float *)acc));
      }
      for (int t = 0; t < tile.tokens; t++) {
        _mm256_storeu_ps(to + t * ldo, acc[t][0]);
        _mm256_storeu_ps(to + t * ldo + 8, acc[t][1]);
      }
    }
  }
}

// Isa has kernels gemm(weight, tokens) and gemv(weight, panels), the latter for 1 to panels(weight);
// look_up(weight, walk) sets what those of LUT8 read.
template <class Isa>
void matmul_tiles(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out,
                  int64_t ldo) {
  const int n = tile_count(acts->tokens);
  const int64_t panel_bytes = int64_t(w->k_padded) * code_bytes(acts->kind) / TOKEN * BLOCK;
  const int at_once = most(1, int(WEIGHT_BYTES / panel_bytes) / Isa::panels(*w)) * Isa::panels(*w);
  for (int p = p0; p < p1; p += at_once) {
    const int end = least(p + at_once, p1);
    for (int i = 0; i < n; i++) {
      const int start = tile_start(acts->tokens, n, i), stop = tile_start(acts->tokens, n, i + 1);
      const int first = most(t0, start), last = least(t1, stop);
      if (first >= last) continue;
      const uint8_t *codes = acts->codes + int64_t(start) * acts->k_padded * code_bytes(acts->kind);
      int32_t refined[MOST_GROUPS];
      const int n_refined = refined_groups(*acts, first, last, refined);
      Tile fine = {w, acts->fine, last - first, nullptr, stop - start, first, nullptr, nullptr, 0};
      if (n_refined > 0) fine.codes = acts->fine->codes + (codes - acts->codes) + TOKEN * (first - start);
      const Tile tile = {w,     acts,  last - first, codes + TOKEN * (first - start), stop - start, first,
                         &fine, refined, n_refined};
      float *to = out + (first - t0) * ldo + ROWS * (p - p0);
      if (tile.tokens == 1) {
        gemv<Isa>(tile, p, end, to);
      } else {
        gemm<Isa>(tile, p, end, to, ldo);
      }
    }
  }
  _mm256_zeroupper();
}

// ---- the kernel in intrinsics ---------------------------------------------------------------------

template <int TYPE>
__m256 load_scales(const uint8_t *p) {
  if constexpr (TYPE == LLMR_F32) return _mm256_loadu_ps((const float *)p);
  const __m128i halves = _mm_loadu_si128((const __m128i *)p);
  if constexpr (TYPE == LLMR_F16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

__m256i broadcast(const void *p) { return _mm256_set1_epi32(*(const int32_t *)p); }

// First and second part of 8 rows of weights, see generate.py.
template <int KIND>
__m256i part(__m256i bytes, bool second) {
  constexpr int shift = KIND == LLMR_W4 ? 4 : 8;
  const __m256i mask = _mm256_set1_epi32(KIND == LLMR_W4 ? 0x0f0f0f0f : 0x00ff00ff);
  return _mm256_and_si256(second ? _mm256_srli_epi16(bytes, shift) : bytes, mask);
}

// How a weight's minima are stored.
enum Minima { NONE, TYPED, ZERO_POINTS };

// Minima of 8 rows with these scales.
template <int TYPE, Minima MINIMA>
__m256 load_mins(const uint8_t *p, __m256 scales) {
  if constexpr (MINIMA == TYPED) return load_scales<TYPE>(p);
  const __m256 zeros = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
  return _mm256_xor_ps(_mm256_mul_ps(scales, zeros), _mm256_set1_ps(-0.f));
}

// The levels of LUT8 in each half of a register, with `more` added.
inline __m256i load_levels(const llmr_weight &w, int more) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)w.levels));
  return _mm256_add_epi8(levels, _mm256_set1_epi8(int8_t(more)));
}

// PANELS beside T tokens. Of a Dot, start() gives sums without minima, weights() makes of a part of
// the panel what add(sum, weights, activations) multiplies, total() makes each row's int32 of the sums. Where the next addition to a sum has to wait (Dot::SPLIT), each part of
// the weights has a sum of its own while registers last.
template <class Dot, int TYPE, Minima MINIMA, int PANELS, int T>
void walk_tile(Walk a) {
  const Dot dot(a);
  constexpr int HALVES = 2 * PANELS;  // 8 rows each
  constexpr int CHAINS = Dot::SPLIT && HALVES * T <= 6 ? 2 : 1;
  constexpr int row = ROWS * (TYPE == LLMR_F32 ? 4 : 2), min_row = MINIMA == ZERO_POINTS ? ROWS : row;
  constexpr bool kept = T == 1;  // one token's accumulators stay in registers
  __m256 acc[HALVES];
  if (kept) {
    LLMR_UNROLL for (int h = 0; h < HALVES; h++) acc[h] = _mm256_loadu_ps(a.acc + 8 * h);
  }
  for (int64_t outer = 0; outer < a.outer; outer++) {
    for (int64_t inner = 0; inner < a.inner; inner++) {
      __m256i sums[CHAINS][HALVES][T];
      LLMR_UNROLL for (int t = 0; t < T; t++) {
        const __m256i start = MINIMA != NONE ? _mm256_setzero_si256() : dot.start(a.init + t);
        LLMR_UNROLL for (int h = 0; h < HALVES; h++) {
          sums[0][h][t] = start;
          if (CHAINS == 2) sums[1 % CHAINS][h][t] = _mm256_setzero_si256();
        }
      }
      const int64_t blocks = Dot::KIND == LLMR_W4 ? 1 : a.blocks;
      for (int64_t b = 0; b < blocks; b++) {
        LLMR_UNROLL for (int j = 0; j < 8; j++) {
          __m256i weights[HALVES];
          LLMR_UNROLL for (int h = 0; h < HALVES; h++) {
            const uint8_t *at = a.w + h / 2 * a.w_panel + h % 2 * 32 + j / 2 * 64;
            weights[h] = dot.weights(part<Dot::KIND>(_mm256_loadu_si256((const __m256i *)at), j % 2));
            if (T <= FEW && h % 2 == 0 && j % 2 == 0) _mm_prefetch((const char *)(at + AHEAD), _MM_HINT_T0);
          }
          LLMR_UNROLL for (int t = 0; t < T; t++) {
            const __m256i x = broadcast(a.x + TOKEN * t + 4 * j);
            LLMR_UNROLL for (int h = 0; h < HALVES; h++) {
              __m256i &sum = sums[j % CHAINS][h][t];
              sum = dot.add(sum, weights[h], x);
            }
          }
        }
        a.w += BLOCK;
        a.x += a.x_step;
      }
      LLMR_UNROLL for (int h = 0; h < HALVES; h++) {
        __m256 ws = load_scales<TYPE>(a.ws + h / 2 * a.s_panel + h % 2 * (row / 2));
        if (Dot::LEVELS) ws = _mm256_mul_ps(ws, _mm256_set1_ps(a.weight->unit));
        __m256 min;
        if (MINIMA != NONE) min = load_mins<TYPE, MINIMA>(a.wm + h / 2 * a.m_panel + h % 2 * (min_row / 2), ws);
        LLMR_UNROLL for (int t = 0; t < T; t++) {
          __m256i rows = dot.total(sums[0][h][t]);
          if (CHAINS == 2) rows = _mm256_add_epi32(rows, dot.total(sums[1 % CHAINS][h][t]));
          const __m256 product = _mm256_cvtepi32_ps(rows);
          const __m256 scale = _mm256_mul_ps(ws, _mm256_broadcast_ss(a.scale + t));
          float *memory = a.acc + 8 * (t * HALVES + h);
          __m256 value = _mm256_fmadd_ps(product, scale, kept ? acc[h] : _mm256_loadu_ps(memory));
          if (MINIMA != NONE) value = _mm256_fmadd_ps(min, _mm256_broadcast_ss(a.sum + t), value);
          if (kept) {
            acc[h] = value;
          } else {
            _mm256_storeu_ps(memory, value);
          }
        }
      }
      a.scale = (const float *)((const uint8_t *)a.scale + a.step);
      a.init = (const int32_t *)((const uint8_t *)a.init + a.step);
      a.sum = (const float *)((const uint8_t *)a.sum + a.step);
    }
    a.ws += row;
    a.wm += min_row;
  }
  if (kept) {
    LLMR_UNROLL for (int h = 0; h < HALVES; h++) _mm256_storeu_ps(a.acc + 8 * h, acc[h]);
  }
}

template <class Dot, int TYPE, int PANELS, int T>
Kernel by_mins(const llmr_weight &w) {
  if constexpr (!Dot::LEVELS) {
    if (w.mins && w.min_type == LLMR_U8) return walk_tile<Dot, TYPE, ZERO_POINTS, PANELS, T>;
    if (w.mins) return walk_tile<Dot, TYPE, TYPED, PANELS, T>;
  }
  return walk_tile<Dot, TYPE, NONE, PANELS, T>;
}

// The kernel for the type of a weight's scales.
template <class Dot, int PANELS, int T>
Kernel by_type(const llmr_weight &w) {
  switch (w.type) {
    case LLMR_F16: return by_mins<Dot, LLMR_F16, PANELS, T>(w);
    case LLMR_BF16: return by_mins<Dot, LLMR_BF16, PANELS, T>(w);
    default: return by_mins<Dot, LLMR_F32, PANELS, T>(w);
  }
}

// The kernel for one panel and 2 to 5 tokens.
template <class Dot>
Kernel gemm_kernel(const llmr_weight &w, int tokens) {
  static_assert(WIDEST == 5, "one case for each width");
  switch (tokens) {
    case 2: return by_type<Dot, 1, 2>(w);
    case 3: return by_type<Dot, 1, 3>(w);
    case 4: return by_type<Dot, 1, 4>(w);
    default: return by_type<Dot, 1, 5>(w);
  }
}

// The kernel for one or two panels and one token.
template <class Dot>
Kernel gemv_kernel(const llmr_weight &w, int panels) {
  return panels == 1 ? by_type<Dot, 1, 1>(w) : by_type<Dot, 2, 1>(w);
}

}  // namespace
}  // namespace llmr
