// The search for the scales of 16 groups, one of each row of a panel, for one instruction set: LLMR_ISA names
// it, LLMR_VECTOR_BYTES is its width. quant/search.py is the definition; the bits are the same everywhere, so
// every sum has its written order, and nothing is fused.
//
// Numbers of a group lie as [column][row]: rows fill the vectors, and no sum goes across one.
#pragma once
#include <stdint.h>
#if LLMR_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

#include "quantize_rows.h"

namespace llmr {
namespace LLMR_ISA {
namespace {

typedef float Vec __attribute__((vector_size(LLMR_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(LLMR_VECTOR_BYTES)));
constexpr int WIDTH = LLMR_VECTOR_BYTES / 4;
constexpr int PARTS = LANES / WIDTH;

constexpr float UNREACHABLE = 0x1p64f;  // for a scale that is zero in the weights' type: all codes become 0
constexpr float ROUNDS = 12582912.0f;   // 1.5 * 2^23: adding it leaves no bits behind the point
constexpr int N_FACTORS = 21;           // candidates for the scale, in this order
constexpr float FACTORS[N_FACTORS] = {0.70f, 0.72f, 0.74f, 0.76f, 0.78f, 0.80f, 0.82f,
                                      0.84f, 0.86f, 0.88f, 0.90f, 0.92f, 0.94f, 0.96f,
                                      0.98f, 1.00f, 1.02f, 1.04f, 1.06f, 1.08f, 1.10f};

struct alignas(64) Lanes {
  float at[LANES];
};

struct alignas(64) Group {
  float w[WIDEST_GROUP][LANES];  // brought near 1 by a power of two, which changes no choice
  float a[WIDEST_GROUP][LANES];  // importance of each error
  Lanes extreme;                 // the weight of largest magnitude, the first of equals, as it was
  Lanes low, high;               // of the weights and 0, as they were
  Lanes power;                   // the power of two
  int n;
};

struct Found {
  Lanes scale;  // as it is stored
  Lanes zero;   // code of 0 (LLMR_GRID_INT4_ZERO)
};

inline Vec load(const float *from) { return *reinterpret_cast<const Vec *>(from); }
inline Vec load_any(const float *from) {
  Vec value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
inline Vec all(float value) { return value - Vec{}; }
inline Vec round_even(Vec x) { return (x + ROUNDS) - ROUNDS; }

inline float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

// To nearest even in an llmr_type, held in fp32. What is too large for the type comes out above its range.
inline float held(int type, float x) {
  if (type == LLMR_F32) return x;
  const uint32_t bits = bits_of(x);
  if (type == LLMR_BF16) return from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
  // Below 2^-14 a half is a multiple of 2^-24, the last bit of 0.5.
  const float small = __builtin_fabsf(x) + 0.5f - 0.5f;
  const float normal = from_bits((bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000u);
  return (bits & 0x7fffffffu) < 0x38800000u ? __builtin_copysignf(small, x) : normal;
}

inline float largest_of(int type) {
  return type == LLMR_F16 ? 65504.0f : type == LLMR_BF16 ? from_bits(0x7f7f0000u) : from_bits(0x7f7fffffu);
}

// Weights that are codes minus a zero point.
struct Integers {
  Lanes low, high;  // least and largest difference
  static constexpr bool TABLE = false;
  Vec nearest(Vec x, int part) const {
    const Vec least = load(low.at + part * WIDTH), most = load(high.at + part * WIDTH);
    x = x < least ? least : x;
    x = x > most ? most : x;
    return round_even(x);
  }
};

// Weights that are entries of an ascending table: a number between two goes to the nearer one, to the lower one
// from the very middle.
struct Table {
  const float *entries;
  Lanes middles;  // in the order of a search tree: the children of i are at 2i and 2i + 1; [0] is not used
#if LLMR_VECTOR_BYTES == 16
  Vec nearest(Vec x, int) const {
    static const int IN_ORDER[15] = {8, 4, 9, 2, 10, 5, 11, 1, 12, 6, 13, 3, 14, 7, 15};
    Vec value = all(entries[0]);
#pragma GCC unroll 15
    for (int i = 0; i < 15; i++) value = x > all(middles.at[IN_ORDER[i]]) ? all(entries[i + 1]) : value;
    return value;
  }
#else
  Vec nearest(Vec x, int) const {
    Ints at = x > all(middles.at[1]) ? Ints{} + 3 : Ints{} + 2;
#pragma GCC unroll 3
    for (int level = 0; level < 3; level++) {
      const Vec middle = level < 2 ? pick(load(middles.at), at) : pick(load(middles.at + LANES - WIDTH), at);
      at = x > middle ? at + at + 1 : at + at;
    }
    const Vec low = pick(load_any(entries), at);
    if (WIDTH == LANES) return low;
    return (at & 8) != 0 ? pick(load_any(entries + LANES - WIDTH), at) : low;
  }

 private:
  // from[at % WIDTH]
  static Vec pick(Vec from, Ints at) {
#if LLMR_VECTOR_BYTES == 64
    return (Vec)_mm512_permutexvar_ps((__m512i)at, (__m512)from);
#else
    return (Vec)_mm256_permutevar8x32_ps((__m256)from, (__m256i)at);
#endif
  }
#endif
};

// 8 lanes by column mod 8, then ((0+4)+(2+6)) + ((1+5)+(3+7)).
inline Vec lane_sum(const Vec *lane) {
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

template <class Grid>
void weighted_error(const Group &group, const Grid &grid, const Lanes &scales, Lanes *error) {
  for (int part = 0; part < PARTS; part++) {
    const int at = part * WIDTH;
    const Vec scale = load(scales.at + at);
    Vec lane[8] = {};
    for (int k = 0; k < group.n; k += 8)
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        const Vec w = load(group.w[k + i] + at);
        const Vec d = w - grid.nearest(w / scale, part) * scale;
        lane[i] += d * d * load(group.a[k + i] + at);
      }
    *reinterpret_cast<Vec *>(error->at + at) = lane_sum(lane);
  }
}

// sum a q w / sum a q^2: the best scale for the values q that a scale gives.
template <class Grid>
void best_for_values(const Group &group, const Grid &grid, const Lanes &scales, Lanes *best) {
  for (int part = 0; part < PARTS; part++) {
    const int at = part * WIDTH;
    const Vec scale = load(scales.at + at);
    Vec above[8] = {}, below[8] = {};
    for (int k = 0; k < group.n; k += 8)
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        const Vec w = load(group.w[k + i] + at), value = grid.nearest(w / scale, part);
        const Vec weighted = value * load(group.a[k + i] + at);
        above[i] += weighted * w;
        below[i] += weighted * value;
      }
    *reinterpret_cast<Vec *>(best->at + at) = lane_sum(above) / lane_sum(below);
  }
}

void find_extremes(const float (*w)[LANES], Group *group) {
  Lanes most = {}, extreme = {}, low = {}, high = {};
  for (int k = 0; k < group->n; k++)
    for (int r = 0; r < LANES; r++) {
      const float x = w[k][r], size = __builtin_fabsf(x);
      extreme.at[r] = size > most.at[r] ? x : extreme.at[r];
      most.at[r] = size > most.at[r] ? size : most.at[r];
      low.at[r] = x < low.at[r] ? x : low.at[r];
      high.at[r] = x > high.at[r] ? x : high.at[r];
    }
  for (int r = 0; r < LANES; r++) {
    // most * 2^-exponent is in [0.5, 1), as near as a finite power can bring it
    int exponent = static_cast<int>(bits_of(most.at[r]) >> 23) - 126;
    exponent = exponent > 126 ? 126 : exponent;
    group->power.at[r] = from_bits(static_cast<uint32_t>(127 - exponent) << 23);
  }
  group->extreme = extreme, group->low = low, group->high = high;
}

// `columns`: importance of the group's columns, or null.
void prepare(const float (*w)[LANES], int n, const float *columns, Group *group) {
  group->n = n;
  find_extremes(w, group);
  for (int k = 0; k < n; k++)
    for (int r = 0; r < LANES; r++) {
      group->w[k][r] = w[k][r] * group->power.at[r];
      group->a[k][r] = columns == nullptr ? 1 : columns[k];
    }
}

// The least error so far, and what gave it.
struct Search {
  const Group &group;
  int type, refits;
  Found *found;
  Lanes least;

  Search(const Group &group, const llmr_quantization &what, Found *found)
      : group(group), type(what.type), refits(what.refits), found(found) {
    for (int r = 0; r < LANES; r++) least.at[r] = __builtin_inff(), found->scale.at[r] = 1, found->zero.at[r] = 0;
  }

  // start * factor as the type holds it; `scale`: beside the group's numbers near 1.
  void candidates(const Lanes &start, float factor, Lanes *stored, Lanes *scale) const {
    const float limit = largest_of(type);
    for (int r = 0; r < LANES; r++) {
      const float s = held(type, start.at[r] * factor), size = __builtin_fabsf(s);
      const bool reachable = size > 0 && size <= limit;
      stored->at[r] = reachable ? s : 1;
      scale->at[r] = reachable ? s * group.power.at[r] : UNREACHABLE;
    }
  }

  template <class Grid>
  void attempt(const Grid &grid, const Lanes &stored, const Lanes &scale, const Lanes *zero) {
    Lanes error;
    weighted_error(group, grid, scale, &error);
    for (int r = 0; r < LANES; r++) {
      const bool better = error.at[r] < least.at[r];
      least.at[r] = better ? error.at[r] : least.at[r];
      found->scale.at[r] = better ? stored.at[r] : found->scale.at[r];
      if (zero != nullptr) found->zero.at[r] = better ? zero->at[r] : found->zero.at[r];
    }
  }

  template <class Grid>
  void refit(const Grid &grid) {
    for (int i = 0; i < refits; i++) {
      Lanes best, stored, scale;
      for (int r = 0; r < LANES; r++) scale.at[r] = found->scale.at[r] * group.power.at[r];
      best_for_values(group, grid, scale, &best);
      for (int r = 0; r < LANES; r++) best.at[r] /= group.power.at[r];
      candidates(best, 1, &stored, &scale);
      attempt(grid, stored, scale, nullptr);
    }
  }
};

void fill(Lanes *lanes, float value) {
  for (int r = 0; r < LANES; r++) lanes->at[r] = value;
}

// Scales start where the extreme weight lies on the first end of the grid, then on the last.
template <class Grid>
void search_signed(const Group &group, const llmr_quantization &what, const Grid &grid, float first, float last,
                   Found *found) {
  Search search(group, what, found);
  Lanes start, stored, scale;
  for (int end = 0; end < what.ends; end++) {
    for (int r = 0; r < LANES; r++) start.at[r] = group.extreme.at[r] / (end == 0 ? first : last);
    for (const float factor : FACTORS) {
      search.candidates(start, factor, &stored, &scale);
      search.attempt(grid, stored, scale, nullptr);
    }
  }
  search.refit(grid);
}

// Differences from zero points.
Integers unsigned_codes(const Lanes &zero) {
  Integers grid;
  for (int r = 0; r < LANES; r++) grid.low.at[r] = 0 - zero.at[r], grid.high.at[r] = 15 - zero.at[r];
  return grid;
}

// The zero points below and above the one that centres the range.
void search_zero(const Group &group, const llmr_quantization &what, Found *found) {
  Search search(group, what, found);
  Lanes start, stored, scale, zero;
  for (int r = 0; r < LANES; r++) start.at[r] = group.high.at[r] / 15 - group.low.at[r] / 15;
  for (const float factor : FACTORS) {
    search.candidates(start, factor, &stored, &scale);
    for (int up = 0; up < 2; up++) {
      for (int r = 0; r < LANES; r++) {
        const float middle = 0.5f * group.high.at[r] * group.power.at[r] + 0.5f * group.low.at[r] * group.power.at[r];
        const float z = __builtin_floorf(7.5f - middle / scale.at[r]) + up;
        zero.at[r] = z < 0 ? 0 : z > 15 ? 15 : z;
      }
      search.attempt(unsigned_codes(zero), stored, scale, &zero);
    }
  }
  search.refit(unsigned_codes(found->zero));
}

void largest_on_127(const Group &group, int type, Found *found) {
  const float limit = largest_of(type);
  for (int r = 0; r < LANES; r++) {
    const float s = held(type, __builtin_fabsf(group.extreme.at[r]) / 127);
    found->scale.at[r] = s > 0 && s <= limit ? s : 1;
  }
}

}  // namespace
}  // namespace LLMR_ISA
}  // namespace llmr
