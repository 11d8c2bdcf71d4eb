#include "pack.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "gguf.h"
#include "kernels.h"

namespace llmr {
namespace {

// The rows of a panel, wherever they lie; fewer than 16 in the last panel of a weight.
struct Rows {
  int n;
  const uint8_t *codes[ROWS];
  const uint8_t *scales[ROWS], *mins[ROWS];
};

// Groups of a row in the source; a padded row has one that covers its padding too.
int groups_of(const llmr_weight &w) { return w.group == w.k_padded ? 1 : w.k / w.group; }

size_t type_bytes(int type) { return type == LLMR_F32 ? 4 : type == LLMR_U8 ? 1 : 2; }

size_t scale_bytes(const llmr_weight &w) { return type_bytes(w.type); }

size_t row_code_bytes(const llmr_weight &w) { return w.kind == LLMR_W8 ? w.k : w.k / 2; }

// Rows of elements: a column of 16 rows for each of `columns` columns.
template <class Element>
void pack_columns(const uint8_t *const *rows, int n, void *to, int columns, int padded_columns) {
  Element *out = static_cast<Element *>(to);
  if (n < ROWS || columns < padded_columns) memset(out, 0, sizeof(Element) * padded_columns * ROWS);
  for (int r = 0; r < n; r++) {
    const Element *row = reinterpret_cast<const Element *>(rows[r]);
    for (int c = 0; c < columns; c++) out[c * ROWS + r] = row[c];
  }
}

// Eight codes of a row (low nibble = even column) into the dword of a tile: byte b holds columns b
// and 4 + b.
inline uint32_t tile_word(uint32_t w) {
  const uint32_t low = w & 0xffff, high = w >> 16;  // columns 0..3 and 4..7, a nibble each
  uint32_t a = (low | low << 8) & 0x00ff00ff, b = (high | high << 8) & 0x00ff00ff;
  a = (a | a << 4) & 0x0f0f0f0f;
  b = (b | b << 4) & 0x0f0f0f0f;
  return a | b << 4;
}

inline uint32_t same_word(uint32_t w) { return w; }

// The dwords of 16 rows side by side, each changed by `word`. Four at a time: a row is read in one
// piece, and each line of the panel written once.
template <uint32_t (*word)(uint32_t)>
void pack_words(const Rows &rows, int words, uint8_t *out) {
  constexpr int STEP = 4;
  int i = 0;
  for (; i + STEP <= words; i += STEP) {
    uint32_t block[ROWS][STEP] = {}, turned[STEP][ROWS];
    for (int r = 0; r < rows.n; r++) memcpy(block[r], rows.codes[r] + 4 * i, sizeof block[r]);
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < STEP; j++) turned[j][r] = word(block[r][j]);
    for (int j = 0; j < STEP; j++) memcpy(out + (i + j) * ROWS * 4, turned[j], 4 * rows.n);
  }
  for (; i < words; i++)
    for (int r = 0; r < rows.n; r++) {
      uint32_t one;
      memcpy(&one, rows.codes[r] + 4 * i, 4);
      one = word(one);
      memcpy(out + (i * ROWS + r) * 4, &one, 4);
    }
}

void pack_codes(const llmr_weight &w, const Rows &rows, uint8_t *out) {
  const bool eight = w.kind == LLMR_W8;
  const int per_word = eight ? 4 : 8, words = w.k / per_word, padded_words = w.k_padded / per_word;
  if (rows.n < ROWS || w.k < w.k_padded) memset(out, eight ? 0x80 : 0x88, sizeof(uint32_t) * padded_words * ROWS);
  if (!eight) return pack_words<tile_word>(rows, words, out);
  pack_words<same_word>(rows, words, out);
  for (int r = 0; r < rows.n; r++)
    for (int k = 4 * words; k < w.k; k++) out[((k / 4) * ROWS + r) * 4 + k % 4] = rows.codes[r][k];
}

// Scales or mins, of `type`.
void pack_scales(const llmr_weight &w, int type, const uint8_t *const *rows, int n, void *to, int panel) {
  if (to == nullptr) return;
  const int padded = w.k_padded / w.group, groups = groups_of(w);
  uint8_t *out = static_cast<uint8_t *>(to) + type_bytes(type) * padded * ROWS * panel;
  if (type == LLMR_F32)
    pack_columns<uint32_t>(rows, n, out, groups, padded);
  else if (type == LLMR_U8)
    pack_columns<uint8_t>(rows, n, out, groups, padded);
  else
    pack_columns<uint16_t>(rows, n, out, groups, padded);
}

void pack_dense(const llmr_weight &w, const Rows &rows, int panel) {
  uint8_t *out = w.codes + scale_bytes(w) * w.k_padded * ROWS * panel;
  if (w.type == LLMR_F32)
    pack_columns<uint32_t>(rows.codes, rows.n, out, w.k, w.k_padded);
  else
    pack_columns<uint16_t>(rows.codes, rows.n, out, w.k, w.k_padded);
}

// Whether a W8 weight comes in codes of four bits.
bool is_widened(const llmr_weight &w, const llmr_source &from) {
  if (w.kind != LLMR_W8) return false;
  switch (from.gguf) {
    case LLMR_GGUF_Q4_0:
    case LLMR_GGUF_Q4_1:
    case LLMR_GGUF_Q2_K:
    case LLMR_GGUF_Q3_K:
    case LLMR_GGUF_Q4_K:
      return true;
    default:
      return from.gguf < 0 && from.row_bytes < w.k;
  }
}

// Codes of four bits (even column low) as bytes that weigh the same: u - 8 = (u + 120) - 128.
void widen_codes(const uint8_t *__restrict in, int columns, bool mins, uint8_t *__restrict out) {
  const uint8_t more = mins ? 0 : 128 - 8;
  for (int i = 0; i < columns / 2; i++) {
    out[2 * i] = static_cast<uint8_t>((in[i] & 15) + more);
    out[2 * i + 1] = static_cast<uint8_t>((in[i] >> 4) + more);
  }
}

// Bytes of a panel's rows of codes, scales and minima, and of one row of codes that are widened.
size_t scratch_bytes(const llmr_weight &w) {
  return ROWS * (row_code_bytes(w) + 2 * scale_bytes(w) * groups_of(w)) + w.k / 2;
}

// Finds the rows of a panel; those of GGUF are unpacked, and those of four bits widened, in `scratch`.
// `bad` counts scales and minima that are not finite.
Rows find_rows(const llmr_weight &w, const llmr_source &from, int panel, uint8_t *scratch, int64_t *bad) {
  Rows rows;
  rows.n = w.n - panel * ROWS < ROWS ? w.n - panel * ROWS : ROWS;
  const size_t code_bytes = row_code_bytes(w), scale_row = scale_bytes(w) * groups_of(w);
  const size_t min_row = type_bytes(w.min_type) * groups_of(w);
  const bool widened = is_widened(w, from);
  uint8_t *nibbles = scratch;
  if (widened) scratch += w.k / 2;
  for (int r = 0; r < rows.n; r++) {
    const int64_t row = from.order == nullptr ? panel * ROWS + r : from.order[panel * ROWS + r];
    const uint8_t *codes = static_cast<const uint8_t *>(from.codes) + row * from.row_bytes;
    if (from.gguf < 0) {
      rows.codes[r] = codes;
      if (widened) {
        widen_codes(codes, w.k, w.mins != nullptr, scratch);
        rows.codes[r] = scratch;
        scratch += code_bytes;
      }
      if (from.scales != nullptr) rows.scales[r] = static_cast<const uint8_t *>(from.scales) + row * scale_row;
      if (from.mins != nullptr) rows.mins[r] = static_cast<const uint8_t *>(from.mins) + row * min_row;
      continue;
    }
    uint8_t *unpacked = scratch, *scales = unpacked + code_bytes, *mins = scales + scale_row;
    *bad += llmr_unpack_gguf(from.gguf, codes, from.row_blocks, widened ? nibbles : unpacked, scales, mins,
                             w.type == LLMR_F32);
    if (widened) widen_codes(nibbles, w.k, w.mins != nullptr, unpacked);
    rows.codes[r] = unpacked, rows.scales[r] = scales, rows.mins[r] = mins;
    scratch = mins + scale_row;
  }
  return rows;
}

// Returns how many scales and minima of GGUF's blocks are not finite.
int64_t pack_panel(const llmr_weight &w, const llmr_source &from, int panel, uint8_t *scratch) {
  int64_t bad = 0;
  const Rows rows = find_rows(w, from, panel, scratch, &bad);
  if (w.kind == LLMR_DENSE) {
    pack_dense(w, rows, panel);
    return bad;
  }
  pack_codes(w, rows, w.codes + static_cast<int64_t>(panel) * w.k_padded * ROWS / (w.kind == LLMR_W8 ? 1 : 2));
  pack_scales(w, w.type, rows.scales, rows.n, w.scales, panel);
  pack_scales(w, w.min_type, rows.mins, rows.n, w.mins, panel);
  return bad;
}

// All weights, cut into pieces that threads take one after the other.
struct Batch {
  const llmr_weight *const *weights;
  const llmr_source *sources;
  int32_t n;
  size_t scratch;
  std::atomic<int32_t> next{0};
  std::atomic<bool> failed{false};
  std::atomic<int32_t> damaged{INT32_MAX};  // the first weight with numbers that are not finite
};

constexpr size_t PIECE = 256 << 10;  // bytes of packed codes, about

int piece_panels(const llmr_weight &w) {
  const size_t panel = ROWS * (w.kind == LLMR_DENSE ? scale_bytes(w) * w.k_padded : row_code_bytes(w));
  return panel < PIECE ? static_cast<int>(PIECE / panel) : 1;
}

int pieces(const llmr_weight &w) { return (w.panels + piece_panels(w) - 1) / piece_panels(w); }

void *take_pieces(void *argument) {
  Batch &batch = *static_cast<Batch *>(argument);
  uint8_t *scratch = static_cast<uint8_t *>(malloc(batch.scratch));
  if (scratch == nullptr) {
    batch.failed = true;
    return nullptr;
  }
  int weight = 0, first = 0;  // the weight a piece belongs to, and the number of its first piece
  for (int piece = batch.next++; ; piece = batch.next++) {
    while (weight < batch.n && piece - first >= pieces(*batch.weights[weight])) first += pieces(*batch.weights[weight++]);
    if (weight == batch.n) break;
    const llmr_weight &w = *batch.weights[weight];
    const int begin = (piece - first) * piece_panels(w), end = begin + piece_panels(w);
    int64_t bad = 0;
    for (int p = begin; p < end && p < w.panels; p++) bad += pack_panel(w, batch.sources[weight], p, scratch);
    int32_t first_damaged = batch.damaged;
    while (bad != 0 && weight < first_damaged && !batch.damaged.compare_exchange_weak(first_damaged, weight)) {
    }
  }
  free(scratch);
  return nullptr;
}

}  // namespace
}  // namespace llmr

int32_t llmr_pack(const llmr_weight *const *weights, const llmr_source *sources, int32_t n, int32_t threads) {
  using namespace llmr;
  Batch batch;
  batch.weights = weights, batch.sources = sources, batch.n = n, batch.scratch = 1;
  int64_t work = 0;
  for (int i = 0; i < n; i++) {
    const size_t scratch = scratch_bytes(*weights[i]);
    if ((sources[i].gguf >= 0 || is_widened(*weights[i], sources[i])) && scratch > batch.scratch) batch.scratch = scratch;
    work += pieces(*weights[i]);
  }
  if (threads > work) threads = static_cast<int32_t>(work);
  pthread_t *helpers = static_cast<pthread_t *>(malloc(sizeof(pthread_t) * (threads > 1 ? threads : 1)));
  int started = 0;  // helpers that cannot be had are done without
  while (helpers != nullptr && started + 1 < threads &&
         pthread_create(&helpers[started], nullptr, take_pieces, &batch) == 0)
    started++;
  take_pieces(&batch);
  for (int i = 0; i < started; i++) pthread_join(helpers[i], nullptr);
  free(helpers);
  if (batch.failed) return -1;
  return batch.damaged < n ? batch.damaged + 1 : 0;
}
