// Attention of a few tokens: chunks of the cache, then their merge.
#pragma once
#include "attend.h"

namespace llmr {

constexpr int BLOCK_KEYS = 64;  // keys converted at a time

// Scores of R queries with W keys, both in rows of `width`. The lanes of a sum hold every W-th column.
template <class F, int R, class Element>
inline void score_keys(const float *queries, const Element *keys, int width, float *scores, int64_t stride) {
  F quads[R][F::W / 4];
  LLMR_UNROLL for (int q = 0; q < F::W / 4; q++, keys += 4 * width) {
    F sums[R][4];
    LLMR_UNROLL for (int r = 0; r < R; r++) {
      LLMR_UNROLL for (int j = 0; j < 4; j++) sums[r][j] = F::set1(0.0f);
    }
    for (int d = 0; d < width; d += F::W) {
      F key[4];
      LLMR_UNROLL for (int j = 0; j < 4; j++) key[j] = load<F>(keys + j * width + d);
      LLMR_UNROLL for (int r = 0; r < R; r++) {
        const F query = F::load(queries + r * width + d);
        LLMR_UNROLL for (int j = 0; j < 4; j++) sums[r][j] = F::fma(query, key[j], sums[r][j]);
      }
    }
    LLMR_UNROLL for (int r = 0; r < R; r++)
      quads[r][q] = F::quad(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
  LLMR_UNROLL for (int r = 0; r < R; r++) F::store(scores + r * stride, F::join(quads[r]));
}

template <class F, int R, class Element>
inline void score_rows(int rows, const float *queries, const Element *keys, int width, float *scores) {
  if constexpr (R > 1)
    if (rows < R) return score_rows<F, R - 1>(rows, queries, keys, width, scores);
  score_keys<F, R>(queries, keys, width, scores, CHUNK_KEYS);
}

// out[rows][width] += weights[rows][n_keys] values[n_keys][width], or = for the first.
template <class F, int R, class Element>
inline void mix_rows(int rows, const float *weights, int n_keys, const Element *values, int width, float *out,
                     int64_t stride, bool first) {
  if constexpr (R > 1)
    if (rows < R) return mix_rows<F, R - 1>(rows, weights, n_keys, values, width, out, stride, first);
  static constexpr float ones[] = {1, 1, 1, 1, 1, 1, 1, 1};
  static_assert(R <= 8);
  const float *factor = first ? nullptr : ones;
  int d = 0;
  for (; d + 4 * F::W <= width; d += 4 * F::W)
    multiply<F, R, 4>(n_keys, weights, CHUNK_KEYS, values + d, width, out + d, stride, factor);
  for (; d + 2 * F::W <= width; d += 2 * F::W)
    multiply<F, R, 2>(n_keys, weights, CHUNK_KEYS, values + d, width, out + d, stride, factor);
  for (; d < width; d += F::W)
    multiply<F, R, 1>(n_keys, weights, CHUNK_KEYS, values + d, width, out + d, stride, factor);
}

// A chunk's work, in a cache of `Element`.
template <class F, class Element>
struct Chunk {
  const AttendTile &tile;
  int rows, width;
  int step;               // rows taken together: as many as the registers hold, in equal parts
  int start, begin, end;  // position of the chunk; keys of it that anyone sees, from a whole block on
  float *queries;         // [rows][width], scaled
  float *scores;          // [rows][CHUNK_KEYS], then weights
  float *block;           // [BLOCK_KEYS][width], converted where rows or keys do not fill vectors

  Chunk(const AttendTile &t, int chunk, void *scratch)
      : tile(t), rows(t.n_tokens * t.n_heads), width(round_up(t.head_dim, F::W)), start(chunk * CHUNK_KEYS) {
    const int seen = first_key(t, 0) - start, behind = end_key(t, t.n_tokens - 1) - start;
    begin = seen > 0 ? seen / BLOCK_KEYS * BLOCK_KEYS : 0;
    end = behind < CHUNK_KEYS ? behind : CHUNK_KEYS;
    const int parts = (rows + F::DECODE_ROWS - 1) / F::DECODE_ROWS;
    step = (rows + parts - 1) / parts;
    queries = static_cast<float *>(scratch);
    scores = queries + rows * width;
    block = scores + rows * CHUNK_KEYS;
    scale_queries<F>(tile, width, queries);
  }

  const Element *at(const void *cache, int key) const {
    return static_cast<const Element *>(cache) + static_cast<int64_t>(start + key) * tile.head_dim;
  }
  // Asks for n rows of the cache that will be needed soon; the hardware does not look past a page.
  void fetch(const Element *row, int n) const {
    const char *at = reinterpret_cast<const char *>(row);
    const size_t bytes = static_cast<size_t>(n) * tile.head_dim * sizeof(Element);
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
  }

  // Scores of keys [key, key + n), rounded up to vectors. What is needed after them starts at `next`.
  template <class From>
  void score(const From *keys, int key, int n, const Element *next) const {
    for (int i = 0; i < n; i += F::W, keys += F::W * width, next += F::W * tile.head_dim) {
      fetch(next, F::W);
      for (int r = 0; r < rows; r += step)
        score_rows<F, F::DECODE_ROWS>(step < rows - r ? step : rows - r, queries + r * width, keys, width,
                                      scores + r * CHUNK_KEYS + key + i);
    }
  }
  void score_block(int key, int n) const {
    const int filled = round_up(n, F::W);
    const Element *next = key + BLOCK_KEYS < end ? at(tile.keys, key + BLOCK_KEYS) : at(tile.values, begin);
    // Converting on the way, for each part of the rows anew, costs less than writing it down.
    if (tile.head_dim == width && filled == n) return score(at(tile.keys, key), key, n, next);
    unpack<F>(at(tile.keys, key), tile.head_dim, n, filled, width, BLOCK_KEYS, block);
    score(block, key, n, next);
  }

  template <class From>
  void mix(const From *values, int key, int n, float *out) const {
    const int stride = partial_stride(tile);
    for (int r = 0; r < rows; r += step)
      mix_rows<F, F::DECODE_ROWS>(step < rows - r ? step : rows - r, scores + r * CHUNK_KEYS + key, n, values,
                                  width, out + static_cast<int64_t>(r) * stride, stride, key == begin);
  }
  void mix_block(int key, int n, float *out) const {
    if (key + BLOCK_KEYS < end) fetch(at(tile.values, key + BLOCK_KEYS), BLOCK_KEYS);
    if (tile.head_dim == width) return mix(at(tile.values, key), key, n, out);
    unpack<F>(at(tile.values, key), tile.head_dim, n, n, width, BLOCK_KEYS, block);
    mix(block, key, n, out);
  }
};

// Attention over one chunk of the cache, for attend_merge.
template <class F, class Element>
inline void attend_keys(const AttendTile &tile, int number, float *partial, void *scratch) {
  const Chunk<F, Element> chunk(tile, number, scratch);
  const int stride = partial_stride(tile);
  for (int key = chunk.begin; key < chunk.end; key += BLOCK_KEYS)
    chunk.score_block(key, chunk.end - key < BLOCK_KEYS ? chunk.end - key : BLOCK_KEYS);
  for (int r = 0; r < chunk.rows; r++) {
    const int t = r / tile.n_heads, end = round_up(chunk.end, F::W);
    float *scores = chunk.scores + r * CHUNK_KEYS;
    float *left = partial + static_cast<int64_t>(r + 1) * stride - 8;
    left[0] = mask_scores<F>(scores, chunk.begin, end, first_key(tile, t) - chunk.start,
                             end_key(tile, t) - chunk.start, tile.softcap);
    left[1] = weigh<F>(scores, chunk.begin, end, left[0]);
  }
  for (int key = chunk.begin; key < chunk.end; key += BLOCK_KEYS)
    chunk.mix_block(key, chunk.end - key < BLOCK_KEYS ? chunk.end - key : BLOCK_KEYS, partial);
}

template <class F>
inline void attend_chunk(const AttendTile &tile, int chunk, float *partial, void *scratch) {
  if (tile.type == LLMR_F16)
    attend_keys<F, uint16_t>(tile, chunk, partial, scratch);
  else
    attend_keys<F, float>(tile, chunk, partial, scratch);
}

// Merges the chunks of one row, `partial` being that of its first chunk, in their order.
template <class F>
inline void merge_row(const float *partial, int64_t chunk_stride, int n_chunks, int dim, int stats,
                      const float *sink,
                      float *out) {
  float best = sink != nullptr && *sink > LOWEST ? *sink : LOWEST;
  for (int c = 0; c < n_chunks; c++) {
    const float score = partial[c * chunk_stride + stats];
    if (score > best) best = score;
  }
  float sums[MAX_HEAD_DIM], total = 0.0f;
  float lanes[F::W];
  if (sink != nullptr) {
    F::store(lanes, exp(F::set1(*sink) - F::set1(best)));
    total = lanes[0];
  }
  for (int d = 0; d < dim; d++) sums[d] = 0.0f;
  for (int c = 0; c < n_chunks; c++, partial += chunk_stride) {
    F::store(lanes, exp(F::set1(partial[stats]) - F::set1(best)));
    const F weight = F::set1(lanes[0]);
    total += lanes[0] * partial[stats + 1];
    for (int d = 0; d < dim; d += F::W)
      F::store(sums + d, F::fma(weight, F::load(partial + d), F::load(sums + d)));
  }
  for (int d = 0; d < dim; d++) out[d] = sums[d] / total;
}

// partials: [chunk][partial_floats], from the tile's first chunk.
template <class F>
inline void attend_merge(const AttendTile &tile, const float *partials) {
  const int stride = partial_stride(tile);
  for (int t = 0; t < tile.n_tokens; t++) {
    const int first = first_key(tile, t) / CHUNK_KEYS, last = (end_key(tile, t) - 1) / CHUNK_KEYS;
    for (int h = 0; h < tile.n_heads; h++) {
      const int64_t row = static_cast<int64_t>(t) * tile.n_heads + h;
      merge_row<F>(partials + (first - first_chunk(tile)) * partial_floats(tile) + row * stride,
                   partial_floats(tile), last - first + 1, tile.head_dim, stride - 8,
                   tile.sinks == nullptr ? nullptr : tile.sinks + h,
                   tile.out + t * tile.out_stride + h * tile.head_dim);
    }
  }
}

}  // namespace llmr
