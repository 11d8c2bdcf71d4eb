// What both kinds of attention are made of, over a vector of floats F; see vector.h.
//
// Beside what vector.h lists, F has
//   ROWS         rows of the prefill's matrix product: ROWS x 2 vectors of sums stay in registers
//   DECODE_ROWS  rows of the decode's: DECODE_ROWS x 4 sums
//   quad(a, b, c, d)  in each 128 bits: the sums of these 128 bits of a, b, c, d
//   join(q)           lane 4 i + j = sum over the 128-bit parts of lane j of q[i]
//   transpose(x)      W vectors in place
//   keep(x, first, last, other)  x in lanes first .. last - 1, other elsewhere
#pragma once
#include "attention.h"
#include "vector.h"

namespace llmr {

constexpr float LOWEST = -3.40282347e38f;

// W values of fp32 or f16.
template <class F>
inline F load(const float *x) {
  return F::load(x);
}
template <class F>
inline F load(const uint16_t *x) {
  return F::load_half(x);
}

// Of `count` values W, or what there is; the other lanes are 0.
template <class F, class Element>
inline F load_some(const Element *x, int count) {
  return count >= F::W ? load<F>(x) : load_part<F>(x, count);
}

// Rows of dim elements to fp32: column c of row i to out[c / panel][i][c % panel], n_rows of them in a
// panel; columns up to a multiple of W become 0. Rows n .. n_filled - 1 become 0 too: a weight of 0
// times what lies there must be 0.
template <class F, class Element>
inline void unpack(const Element *x, int dim, int n, int n_filled, int panel, int n_rows, float *out) {
  const int64_t panel_floats = static_cast<int64_t>(n_rows) * panel;
  for (int i = 0; i < n_filled; i++, x += dim, out += panel) {
    float *to = out;
    for (int begin = 0; begin < dim; begin += panel, to += panel_floats)
      for (int c = 0; c < panel && begin + c < dim; c += F::W)
        F::store(to + c, i < n ? load_some<F>(x + begin + c, dim - begin - c) : F::set1(0.0f));
  }
}

// Queries times scale to rows of `width`, filled with 0.
template <class F>
inline void scale_queries(const AttendTile &tile, int width, float *out) {
  const F scale = F::set1(tile.scale);
  for (int t = 0; t < tile.n_tokens; t++)
    for (int h = 0; h < tile.n_heads; h++, out += width) {
      const float *query = tile.queries + t * tile.query_stride + h * tile.head_dim;
      for (int d = 0; d < tile.head_dim; d += F::W)
        F::store(out + d, load_some<F>(query + d, tile.head_dim - d) * scale);
    }
}

// Loops over sums in registers must be unrolled early, or gcc keeps the sums in memory.
#define LLMR_UNROLL _Pragma("GCC unroll 16")

// c[R][N W] = factor[R] * c + a[R][k] b[k][N W]; factor null: c counts as 0.
template <class F, int R, int N, class Element>
inline void multiply(int k, const float *a, int64_t lda, const Element *b, int64_t ldb, float *c, int64_t ldc,
                     const float *factor) {
  F sums[R][N];
  LLMR_UNROLL for (int r = 0; r < R; r++) {
    LLMR_UNROLL for (int j = 0; j < N; j++) sums[r][j] = F::set1(0.0f);
  }
  if (factor != nullptr) {
    LLMR_UNROLL for (int r = 0; r < R; r++) {
      LLMR_UNROLL for (int j = 0; j < N; j++)
        sums[r][j] = F::load(c + r * ldc + j * F::W) * F::set1(factor[r]);
    }
  }
  for (int i = 0; i < k; i++, b += ldb) {
    F row[N];
    LLMR_UNROLL for (int j = 0; j < N; j++) row[j] = load<F>(b + j * F::W);
    LLMR_UNROLL for (int r = 0; r < R; r++) {
      const F x = F::set1(a[r * lda + i]);
      LLMR_UNROLL for (int j = 0; j < N; j++) sums[r][j] = F::fma(x, row[j], sums[r][j]);
    }
  }
  LLMR_UNROLL for (int r = 0; r < R; r++) {
    LLMR_UNROLL for (int j = 0; j < N; j++) F::store(c + r * ldc + j * F::W, sums[r][j]);
  }
}

// Softcap of scores [begin, end), then -inf where the row, which sees [first, last), does not look.
// begin and end are multiples of W. Returns the largest score, or LOWEST.
template <class F>
inline float mask_scores(float *scores, int begin, int end, int first, int last, float softcap) {
  const F cap = F::set1(softcap), by = F::set1(1.0f / softcap);
  F best = F::set1(LOWEST);
  for (int i = begin; i < end; i += F::W) {
    F x = F::load(scores + i);
    const bool is_edge = i < first || i + F::W > last;
    if (softcap != 0.0f) x = tanh(x * by) * cap;
    if (is_edge) x = F::keep(x, first - i, last - i, F::set1(-__builtin_inff()));
    if (is_edge || softcap != 0.0f) F::store(scores + i, x);
    best = F::max(x, best);
  }
  return F::largest(best);
}

// Scores [begin, end) to weights exp(score - best). Returns their sum.
template <class F>
inline float weigh(float *scores, int begin, int end, float best) {
  const F shift = F::set1(best);
  F sum = F::set1(0.0f);
  for (int i = begin; i < end; i += F::W) {
    const F weight = exp_capped(F::load(scores + i) - shift);
    F::store(scores + i, weight);
    sum = sum + weight;
  }
  return F::sum(sum);
}

}  // namespace llmr
