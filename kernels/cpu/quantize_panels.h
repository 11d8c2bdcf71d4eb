// quantize_rows for one instruction set; see quantize_search.h for the macros that name it.
#pragma once
#include "quantize_search.h"

namespace llmr {
namespace LLMR_ISA {
namespace {

using Column = float[LANES];

bool is_finite(int type, const void *row, int64_t k) {
  uint32_t most = 0;
  if (type == LLMR_F32) {
    for (int64_t i = 0; i < k; i++) {
      const uint32_t size = static_cast<const uint32_t *>(row)[i] & 0x7fffffffu;
      most = size > most ? size : most;
    }
    return most < 0x7f800000u;
  }
  for (int64_t i = 0; i < k; i++) {
    const uint32_t size = static_cast<const uint16_t *>(row)[i] & 0x7fffu;
    most = size > most ? size : most;
  }
  return most < (type == LLMR_BF16 ? 0x7f80u : 0x7c00u);
}

const uint8_t *row_at(const llmr_quantization &what, int64_t row) {
  return static_cast<const uint8_t *>(what.weights) + row * what.k * (what.type == LLMR_F32 ? 4 : 2);
}

// Index of the first weight of rows row..end that is not finite; -1: all are.
int64_t first_not_finite(const llmr_quantization &what, int64_t row, int64_t end) {
  const int bytes = what.type == LLMR_F32 ? 4 : 2;
  for (; row < end; row++) {
    const uint8_t *at = row_at(what, row);
    if (is_finite(what.type, at, what.k)) continue;
    int64_t column = 0;
    while (is_finite(what.type, at + column * bytes, 1)) column++;
    return row * what.k + column;
  }
  return -1;
}

inline float widened(int type, const uint8_t *row, int64_t column) {
  if (type == LLMR_F32) {
    float value;
    __builtin_memcpy(&value, row + 4 * column, 4);
    return value;
  }
  uint16_t bits;
  __builtin_memcpy(&bits, row + 2 * column, 2);
  if (type == LLMR_BF16) return from_bits(static_cast<uint32_t>(bits) << 16);
  // Exponent and mantissa moved into place and scaled by 2^112: right for sub-normals too.
  const float size = from_bits((bits & 0x7fffu) << 13) * 0x1p112f;
  return bits & 0x8000 ? -size : size;
}

template <int TYPE>
void load_rows(const uint8_t *const *rows, int n, int64_t column, int64_t width, Column *to) {
  for (int r = 0; r < n; r++)
    for (int64_t k = 0; k < width; k++) to[k][r] = widened(TYPE, rows[r], column + k);
}

// Columns column.. of a panel that begins at `row`; rows beyond `end` weigh nothing.
void load_panel(const llmr_quantization &what, int64_t row, int64_t end, int64_t column, int64_t width, Column *to) {
  const int n = end - row < LANES ? static_cast<int>(end - row) : LANES;
  if (n < LANES) __builtin_memset(to, 0, sizeof(Column) * width);
  const uint8_t *rows[LANES];
  for (int r = 0; r < n; r++) rows[r] = row_at(what, row + r);
  switch (what.type) {
    case LLMR_F32:
      return load_rows<LLMR_F32>(rows, n, column, width, to);
    case LLMR_BF16:
      return load_rows<LLMR_BF16>(rows, n, column, width, to);
    default:
      return load_rows<LLMR_F16>(rows, n, column, width, to);
  }
}

// The later columns i of a group, or of a block, take over their part of the errors d of columns 0..n, one
// after another. `factors`: row of column 0.
void spread(const Column *d, int n, const float *factors, int64_t width, int64_t from, int64_t to, Column *w) {
  constexpr int STEP = 4;  // columns at once, so that an error is loaded once for them
  for (int part = 0; part < PARTS; part++) {
    const int at = part * WIDTH;
    int64_t i = from;
    for (; i + STEP <= to; i += STEP) {
      Vec sum[STEP];
#pragma GCC unroll 4
      for (int c = 0; c < STEP; c++) sum[c] = load(w[i + c] + at);
      for (int j = 0; j < n; j++) {
        const Vec error = load(d[j] + at);
        const float *factor = factors + j * width + i;
#pragma GCC unroll 4
        for (int c = 0; c < STEP; c++) sum[c] -= error * all(factor[c]);
      }
#pragma GCC unroll 4
      for (int c = 0; c < STEP; c++) *reinterpret_cast<Vec *>(w[i + c] + at) = sum[c];
    }
    for (; i < to; i++) {
      Vec sum = load(w[i] + at);
      for (int j = 0; j < n; j++) sum -= load(d[j] + at) * all(factors[j * width + i]);
      *reinterpret_cast<Vec *>(w[i] + at) = sum;
    }
  }
}

// What a panel's group becomes.
struct Coded {
  alignas(64) uint8_t codes[WIDEST_GROUP][LANES];
  Found found;
};

// Codes of a group, column by column; with factors, d receives the errors, and later columns of the group have
// taken over their part.
template <class Grid>
void round_columns(const Grid &grid, Column *w, int n, const float *factors, int64_t width, Column *d, Coded *coded) {
  for (int k = 0; k < n; k++) {
    Lanes level;
    for (int part = 0; part < PARTS; part++) {
      const int at = part * WIDTH;
      const Vec x = load(w[k] + at), scale = load(coded->found.scale.at + at);
      const Vec value = grid.nearest(x / scale, part);
      *reinterpret_cast<Vec *>(level.at + at) = value;
      if (factors != nullptr) *reinterpret_cast<Vec *>(d[k] + at) = x - value * scale;
    }
    grid.encode(level, coded->codes[k]);
    if (factors != nullptr) spread(d + k, 1, factors + k * width, width, k + 1, n, w);
  }
}

struct IntegerCodes : Integers {
  Lanes zero;
  void encode(const Lanes &level, uint8_t *to) const {
    for (int r = 0; r < LANES; r++) to[r] = static_cast<uint8_t>(static_cast<int>(level.at[r] + zero.at[r]));
  }
};

struct TableCodes : Table {
  void encode(const Lanes &level, uint8_t *to) const {
    for (int r = 0; r < LANES; r++) {
      int code = 0;
      for (int i = 0; i < 15; i++) code += level.at[r] > entries[i];
      to[r] = static_cast<uint8_t>(code);
    }
  }
};

IntegerCodes integers(float low, float high, float zero) {
  IntegerCodes grid;
  fill(&grid.low, low), fill(&grid.high, high), fill(&grid.zero, zero);
  return grid;
}

TableCodes table_of(const float *entries) {
  TableCodes grid;
  grid.entries = entries;
  grid.middles.at[0] = 0;
  for (int i = 1, step = 16; i < LANES; i++) {
    if ((i & (i - 1)) == 0) step /= 2;  // a level of the tree begins
    const int entry = step * (2 * (i & (8 / step - 1)) + 1) - 1;
    grid.middles.at[i] = 0.5f * (entries[entry] + entries[entry + 1]);
  }
  return grid;
}

void quantize_group(const llmr_quantization &what, Column *w, const float *importance, const float *factors,
                    int64_t width, Column *d, Coded *coded) {
  Group group;
  prepare(w, what.group, importance, &group);
  Found *found = &coded->found;
  switch (what.grid) {
    case LLMR_GRID_INT4: {
      const IntegerCodes grid = integers(-8, 7, 8);
      search_signed(group, what, static_cast<const Integers &>(grid), -8, 7, found);
      return round_columns(grid, w, what.group, factors, width, d, coded);
    }
    case LLMR_GRID_TABLE: {
      const TableCodes grid = table_of(what.table);
      search_signed(group, what, static_cast<const Table &>(grid), what.table[0], what.table[15], found);
      return round_columns(grid, w, what.group, factors, width, d, coded);
    }
    case LLMR_GRID_INT8:
      largest_on_127(group, what.type, found);
      return round_columns(integers(-127, 127, 128), w, what.group, factors, width, d, coded);
    default: {
      search_zero(group, what, found);
      return round_columns(IntegerCodes{unsigned_codes(found->zero), found->zero}, w, what.group, factors,
                           width, d, coded);
    }
  }
}

uint16_t half_bits(float value) {  // of a number that a half can hold
  const uint32_t bits = bits_of(value), size = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (size < 0x38800000u) return static_cast<uint16_t>(sign | static_cast<uint32_t>(from_bits(size) * 0x1p24f));
  return static_cast<uint16_t>(sign | ((size >> 13) - (112 << 10)));
}

void store_group(const llmr_quantization &what, int64_t row, int64_t end, int64_t column, const Coded &coded) {
  const int n = end - row < LANES ? static_cast<int>(end - row) : LANES;
  for (int r = 0; r < n; r++) {
    const int64_t place = ((row + r) * what.k + column) / what.group;
    const float scale = coded.found.scale.at[r];
    if (what.type == LLMR_F32)
      static_cast<float *>(what.scales)[place] = scale;
    else
      static_cast<uint16_t *>(what.scales)[place] =
          what.type == LLMR_BF16 ? static_cast<uint16_t>(bits_of(scale) >> 16) : half_bits(scale);
    if (what.grid == LLMR_GRID_INT4_ZERO) what.zeros[place] = static_cast<uint8_t>(coded.found.zero.at[r]);
    const int64_t at = (row + r) * what.k + column;
    if (what.grid == LLMR_GRID_INT8) {
      for (int k = 0; k < what.group; k++) what.codes[at + k] = coded.codes[k][r];
    } else {
      uint8_t *to = what.codes + at / 2;
      for (int k = 0; k < what.group; k += 2)
        to[k / 2] = static_cast<uint8_t>((coded.codes[k][r] & 15) | coded.codes[k + 1][r] << 4);
    }
  }
}

}  // namespace

int64_t quantize_rows(const llmr_quantization &what, int64_t row0, int64_t row1, float *memory) {
  constexpr int64_t ROWS_AT_ONCE = PANELS * LANES;
  Column *errors = reinterpret_cast<Column *>(memory);
  Column *weights = errors + PANELS * WIDEST_GROUP;
  Coded coded;
  for (int64_t row = row0; row < row1; row += ROWS_AT_ONCE) {
    const int64_t end = row1 - row < ROWS_AT_ONCE ? row1 : row + ROWS_AT_ONCE;
    const int64_t bad = first_not_finite(what, row, end);
    if (bad >= 0) return bad;
    int64_t column = 0;
    for (int block = 0; column < what.k; block++) {
      const bool compensated = what.n_blocks > 0;
      const int64_t width = compensated ? what.widths[block] : what.group;
      const float *factors = compensated ? what.factors[block] : nullptr;
      for (int64_t at = row, p = 0; at < end; at += LANES, p++)
        load_panel(what, at, end, column, width, weights + p * width);
      for (int64_t g = 0; g < width; g += what.group) {
        const float *own = compensated ? factors + g * width + g : nullptr;
        const float *importance = what.importance == nullptr ? nullptr : what.importance + column + g;
        for (int64_t at = row, p = 0; at < end; at += LANES, p++) {
          Column *w = weights + p * width, *d = errors + p * WIDEST_GROUP;
          quantize_group(what, w + g, importance, own, width, d, &coded);
          store_group(what, at, end, column + g, coded);
        }
        if (compensated)
          for (int64_t at = row, p = 0; at < end; at += LANES, p++)
            spread(errors + p * WIDEST_GROUP, what.group, factors + g * width, width, g + what.group, width,
                   weights + p * width);
      }
      column += width;
    }
  }
  return -1;
}

}  // namespace LLMR_ISA
}  // namespace llmr
