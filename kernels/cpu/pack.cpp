#include "pack.h"

#include <string.h>

#include "kernels.h"

namespace llmr {
namespace {

// A column of 16 rows of 2- or 4-byte elements, for each of `columns` columns.
template <class Element>
void pack_columns(const void *from, void *to, int n, int columns, int padded_columns, int p0, int p1) {
  const Element *source = static_cast<const Element *>(from);
  for (int p = p0; p < p1; p++) {
    Element *out = static_cast<Element *>(to) + static_cast<int64_t>(p) * padded_columns * ROWS;
    const int rows = n - p * ROWS < ROWS ? n - p * ROWS : ROWS;
    if (rows < ROWS || columns < padded_columns) memset(out, 0, sizeof(Element) * padded_columns * ROWS);
    for (int r = 0; r < rows; r++) {
      const Element *row = source + static_cast<int64_t>(p * ROWS + r) * columns;
      for (int c = 0; c < columns; c++) out[c * ROWS + r] = row[c];
    }
  }
}

// Eight codes of a row (low nibble = even column) into the dword of a tile: byte b holds columns b
// and 4 + b.
uint32_t tile_word(uint32_t w) {
  const uint32_t low = w & 0xffff, high = w >> 16;  // columns 0..3 and 4..7, a nibble each
  uint32_t a = (low | low << 8) & 0x00ff00ff, b = (high | high << 8) & 0x00ff00ff;
  a = (a | a << 4) & 0x0f0f0f0f;
  b = (b | b << 4) & 0x0f0f0f0f;
  return a | b << 4;
}

void pack_w4(const llmr_weight &w, const uint8_t *codes, int p0, int p1) {
  const int words = w.k / 8, padded_words = w.k_padded / 8;  // 8 columns in 4 bytes of a row
  for (int p = p0; p < p1; p++) {
    uint8_t *out = w.codes + static_cast<int64_t>(p) * padded_words * ROWS * 4;
    const int rows = w.n - p * ROWS < ROWS ? w.n - p * ROWS : ROWS;
    if (rows < ROWS || words < padded_words) memset(out, 0x88, static_cast<size_t>(padded_words) * ROWS * 4);
    for (int r = 0; r < rows; r++) {
      const uint8_t *row = codes + static_cast<int64_t>(p * ROWS + r) * (w.k / 2);
      for (int i = 0; i < words; i++) {
        uint32_t word;
        memcpy(&word, row + 4 * i, 4);
        word = tile_word(word);
        memcpy(out + (i * ROWS + r) * 4, &word, 4);
      }
    }
  }
}

void pack_w8(const llmr_weight &w, const uint8_t *codes, int p0, int p1) {
  const int words = w.k / 4, padded_words = w.k_padded / 4;
  for (int p = p0; p < p1; p++) {
    uint8_t *out = w.codes + static_cast<int64_t>(p) * padded_words * ROWS * 4;
    const int rows = w.n - p * ROWS < ROWS ? w.n - p * ROWS : ROWS;
    if (rows < ROWS || words < padded_words) memset(out, 0x80, static_cast<size_t>(padded_words) * ROWS * 4);
    for (int r = 0; r < rows; r++) {
      const uint8_t *row = codes + static_cast<int64_t>(p * ROWS + r) * w.k;
      for (int i = 0; i < words; i++) memcpy(out + (i * ROWS + r) * 4, row + 4 * i, 4);
      for (int k = 4 * words; k < w.k; k++) out[((k / 4) * ROWS + r) * 4 + k % 4] = row[k];
    }
  }
}

void pack_scales(const llmr_weight &w, const void *from, void *to, int p0, int p1) {
  if (from == nullptr) return;
  const int padded = w.k_padded / w.group;
  const int groups = w.group == w.k_padded ? 1 : (w.k + w.group - 1) / w.group;
  if (w.type == LLMR_F32)
    pack_columns<uint32_t>(from, to, w.n, groups, padded, p0, p1);
  else
    pack_columns<uint16_t>(from, to, w.n, groups, padded, p0, p1);
}

}  // namespace

void pack_panels(const llmr_weight &w, const RowMajor &from, int p0, int p1) {
  if (w.kind == LLMR_DENSE) {
    if (w.type == LLMR_F32)
      pack_columns<uint32_t>(from.codes, w.codes, w.n, w.k, w.k_padded, p0, p1);
    else
      pack_columns<uint16_t>(from.codes, w.codes, w.n, w.k, w.k_padded, p0, p1);
    return;
  }
  if (w.kind == LLMR_W8)
    pack_w8(w, from.codes, p0, p1);
  else
    pack_w4(w, from.codes, p0, p1);
  pack_scales(w, from.scales, w.scales, p0, p1);
  pack_scales(w, from.mins, w.mins, p0, p1);
}

}  // namespace llmr
