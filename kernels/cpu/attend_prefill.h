// Attention of many tokens: keys and values converted tile by tile, a running softmax.
#pragma once
#include "attend.h"

namespace llmr {

constexpr int TILE_KEYS = 128;  // the first key of a tile stands at a multiple of this

// The running softmax of F::ROWS rows: weights are exp(score - best).
template <class F>
struct Running {
  static constexpr int LANES = (F::ROWS + F::W - 1) / F::W * F::W;
  float best[LANES], total[LANES];
};

// Where the parts of the computation lie in the scratch.
template <class F>
struct Prefill {
  static constexpr int PANEL = 2 * F::W;
  int rows, blocks, width;
  float *queries;       // [blocks * ROWS][head_dim], scaled
  float *out;           // [blocks * ROWS][width]
  float *keys;          // [panel][head_dim][PANEL]
  float *values;        // [panel of columns][TILE_KEYS][PANEL]
  float *scores;        // [ROWS][TILE_KEYS]
  Running<F> *running;  // [blocks]
};

template <class F>
inline Prefill<F> prepare(const AttendTile &tile, void *scratch) {
  constexpr size_t most_rows = MAX_TILE_ROWS + F::ROWS;
  static_assert((2 * (most_rows + TILE_KEYS) * MAX_HEAD_DIM + F::ROWS * TILE_KEYS + 4 * most_rows) *
                    sizeof(float) <= SCRATCH);
  Prefill<F> p;
  p.rows = tile.n_tokens * tile.n_heads;
  p.blocks = (p.rows + F::ROWS - 1) / F::ROWS;
  p.width = round_up(tile.head_dim, F::W);
  const int padded = p.blocks * F::ROWS, panels = round_up(p.width, p.PANEL);
  p.queries = static_cast<float *>(scratch);
  p.out = p.queries + padded * p.width;
  p.keys = p.out + padded * p.width;
  p.values = p.keys + TILE_KEYS * tile.head_dim;
  p.scores = p.values + TILE_KEYS * panels;
  p.running = reinterpret_cast<Running<F> *>(p.scores + F::ROWS * TILE_KEYS);

  scale_queries<F>(tile, p.width, p.queries);
  for (int i = p.rows * p.width; i < padded * p.width; i += F::W) F::store(p.queries + i, F::set1(0.0f));
  for (int i = 0; i < padded * p.width; i += F::W) F::store(p.out + i, F::set1(0.0f));
  for (int b = 0; b < p.blocks; b++)
    for (int i = 0; i < Running<F>::LANES; i++) {
      const float sink = tile.sinks == nullptr ? LOWEST : tile.sinks[(b * F::ROWS + i) % tile.n_heads];
      p.running[b].best[i] = sink > LOWEST ? sink : LOWEST;
      p.running[b].total[i] = tile.sinks == nullptr ? 0.0f : 1.0f;
    }
  return p;
}

// Scores [begin, end) of a block of rows to weights. `factor` becomes what its sums so far shrink by.
template <class F>
inline void soften(const AttendTile &tile, int block, int start, int begin, int end, float *scores,
                   Running<F> &running, float *factor) {
  float best[Running<F>::LANES] = {}, sums[Running<F>::LANES] = {};
  for (int r = 0; r < F::ROWS; r++) {
    int t = (block * F::ROWS + r) / tile.n_heads;
    if (t >= tile.n_tokens) t = tile.n_tokens - 1;
    float *row = scores + r * TILE_KEYS;
    const float most = mask_scores<F>(row, begin, end, first_key(tile, t) - start, end_key(tile, t) - start,
                                      tile.softcap);
    best[r] = most > running.best[r] ? most : running.best[r];
    sums[r] = weigh<F>(row, begin, end, best[r]);
  }
  for (int i = 0; i < Running<F>::LANES; i += F::W) {
    const F shrink = exp(F::load(running.best + i) - F::load(best + i));
    F::store(factor + i, shrink);
    F::store(running.total + i, F::fma(F::load(running.total + i), shrink, F::load(sums + i)));
    F::store(running.best + i, F::load(best + i));
  }
}

// One block of rows over one tile of keys, start .. start + n - 1.
template <class F>
inline void attend_block(const AttendTile &tile, const Prefill<F> &p, int block, int start, int n) {
  constexpr int PANEL = Prefill<F>::PANEL;
  const int first_token = block * F::ROWS / tile.n_heads, last_row = block * F::ROWS + F::ROWS - 1;
  const int last_token = (last_row < p.rows ? last_row : p.rows - 1) / tile.n_heads;
  const int seen = first_key(tile, first_token) - start, behind = end_key(tile, last_token) - start;
  const int begin = seen > 0 ? seen / PANEL * PANEL : 0;
  const int end = round_up(behind < n ? behind : n, PANEL);
  if (begin >= end) return;
  const int dim = tile.head_dim;
  for (int key = begin; key < end; key += PANEL)
    multiply<F, F::ROWS, 2>(dim, p.queries + block * F::ROWS * p.width, p.width, p.keys + key * dim, PANEL,
                            p.scores + key, TILE_KEYS, nullptr);
  float factor[Running<F>::LANES];
  soften<F>(tile, block, start, begin, end, p.scores, p.running[block], factor);
  float *out = p.out + block * F::ROWS * p.width;
  for (int d = 0; d < dim; d += PANEL) {
    const float *weights = p.scores + begin, *values = p.values + d * TILE_KEYS + begin * PANEL;
    if (d + F::W < dim)
      multiply<F, F::ROWS, 2>(end - begin, weights, TILE_KEYS, values, PANEL, out + d, p.width, factor);
    else
      multiply<F, F::ROWS, 1>(end - begin, weights, TILE_KEYS, values, PANEL, out + d, p.width, factor);
  }
}

// Keys to [panel][dim][PANEL]; the last panel is filled with 0.
template <class F, class Element>
inline void transpose_keys(const Element *keys, int dim, int n, float *out) {
  constexpr int PANEL = Prefill<F>::PANEL;
  for (int key = 0; key < round_up(n, PANEL); key += F::W) {
    float *panel = out + key / PANEL * PANEL * dim + key % PANEL;
    for (int d = 0; d < dim; d += F::W) {
      F rows[F::W];
      for (int i = 0; i < F::W; i++)
        rows[i] = key + i < n ? load_some<F>(keys + (key + i) * dim + d, dim - d) : F::set1(0.0f);
      F::transpose(rows);
      for (int i = 0; i < F::W && d + i < dim; i++) F::store(panel + (d + i) * PANEL, rows[i]);
    }
  }
}

// Attention of all rows of the tile over all keys they see, in a cache of `Element`.
template <class F, class Element>
inline void attend_rows(const AttendTile &tile, void *scratch) {
  const Prefill<F> p = prepare<F>(tile, scratch);
  const int length = end_key(tile, tile.n_tokens - 1);
  for (int start = first_key(tile, 0) / TILE_KEYS * TILE_KEYS; start < length; start += TILE_KEYS) {
    const int n = length - start < TILE_KEYS ? length - start : TILE_KEYS;
    const int64_t from = static_cast<int64_t>(start) * tile.head_dim;
    const Element *keys = static_cast<const Element *>(tile.keys) + from;
    const Element *values = static_cast<const Element *>(tile.values) + from;
    transpose_keys<F>(keys, tile.head_dim, n, p.keys);
    unpack<F>(values, tile.head_dim, n, round_up(n, p.PANEL), p.PANEL, TILE_KEYS, p.values);
    for (int block = 0; block < p.blocks; block++) attend_block<F>(tile, p, block, start, n);
  }
  for (int r = 0; r < p.rows; r++) {
    float *out = tile.out + r / tile.n_heads * tile.out_stride + r % tile.n_heads * tile.head_dim;
    const float total = p.running[r / F::ROWS].total[r % F::ROWS];
    for (int d = 0; d < tile.head_dim; d++) out[d] = p.out[r * p.width + d] / total;
  }
}

template <class F>
inline void attend_tile(const AttendTile &tile, void *scratch) {
  if (tile.type == LLMR_F16)
    attend_rows<F, uint16_t>(tile, scratch);
  else
    attend_rows<F, float>(tile, scratch);
}

}  // namespace llmr
