// Attention of the query heads that share a kv head: what op_attend hands to the kernels.
//
// A few tokens of a span (decoding, verifying a draft) are attended chunk by chunk of the cache and
// merged; more of them (prefill) tile by tile with a running softmax. In both a row's result depends
// on nothing but its own query and keys: not on the tokens beside it, the tiling or the workers.
#pragma once
#include "kernels.h"

namespace llmr {

constexpr int DECODE_TOKENS = 8;   // a span of so many tokens or fewer is attended by chunks
constexpr int CHUNK_KEYS = 256;    // keys of a chunk; the first stands at a multiple of this
constexpr int MAX_TILE_HEADS = 32; // query heads of a tile
constexpr int MAX_TILE_ROWS = 512; // rows of a tile: tokens x heads
constexpr int MAX_HEAD_DIM = 512;  // for which the scratch suffices

// Consecutive tokens of one span and consecutive query heads of one kv head.
// Row r is head r % n_heads of token r / n_heads.
struct AttendTile {
  const float *queries;       // token t, head h at queries + t * query_stride + h * head_dim
  float *out;                 // likewise with out_stride
  const void *keys, *values;  // [position][head_dim] of `type`, from position 0 of the slot
  const float *sinks;         // [n_heads], or null
  int64_t query_stride, out_stride;
  int32_t type, head_dim;     // head_dim: a multiple of 8, at most MAX_HEAD_DIM
  int32_t n_tokens, n_heads;
  int32_t position;           // of the first token
  int32_t window;             // 0: none
  float scale, softcap;       // softcap 0: none
};

// The first key token t sees, and the one behind its last.
static inline int first_key(const AttendTile &tile, int t) {
  const int first = tile.position + t + 1 - tile.window;
  return tile.window == 0 || first < 0 ? 0 : first;
}
static inline int end_key(const AttendTile &tile, int t) { return tile.position + t + 1; }

// Chunks the tile's tokens see between them: first_chunk .. end_chunk - 1.
static inline int first_chunk(const AttendTile &tile) { return first_key(tile, 0) / CHUNK_KEYS; }
static inline int end_chunk(const AttendTile &tile) {
  return (end_key(tile, tile.n_tokens - 1) + CHUNK_KEYS - 1) / CHUNK_KEYS;
}

static inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// What a chunk leaves for the merge, per row: [head_dim] sums of weight * value, space up to a multiple of
// 16, the largest score, the sum of the weights, and space. weight = exp(score - largest score).
static inline int partial_stride(const AttendTile &tile) { return round_up(tile.head_dim, 16) + 8; }
static inline int64_t partial_floats(const AttendTile &tile) {
  return static_cast<int64_t>(tile.n_tokens) * tile.n_heads * partial_stride(tile);
}

}  // namespace llmr
