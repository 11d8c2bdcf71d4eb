// matmul_float without vector instructions of its own; the compiler uses what the base has.
#include "float.h"

#include <string.h>

namespace llmr {
namespace {

struct Vec {
  float row[ROWS];
};
struct Words {
  const uint8_t *bytes;
};
struct Table {
  const float *values;
};
using Splat = float;

constexpr int TOKENS = 2;
constexpr int BLOCK = 256;
constexpr int panels_at_once(bool, int) { return 1; }

Vec zero() { return {}; }
Vec load(const float *p) {
  Vec v;
  memcpy(v.row, p, sizeof v.row);
  return v;
}
void store(float *p, const Vec &v) { memcpy(p, v.row, sizeof v.row); }
Splat splat(float f) { return f; }

float from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

// Workers count sub-normal floats as 0, so a sub-normal half is converted as an integer.
float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  const float small = static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f;
  const float normal = from_bits((rest << 13) + (rest < 0x7c00 ? 112u << 23 : 0x7f800000u - (0x7c00u << 13)));
  const float magnitude = rest < 0x400 ? small : normal;
  return sign ? -magnitude : magnitude;
}

Vec load_half(const uint16_t *p) {
  Vec v;
  for (int r = 0; r < ROWS; r++) v.row[r] = half_to_float(p[r]);
  return v;
}
Vec load_bf16(const uint16_t *p) {
  Vec v;
  for (int r = 0; r < ROWS; r++) v.row[r] = from_bits(static_cast<uint32_t>(p[r]) << 16);
  return v;
}
Words load_words(const uint8_t *p) { return {p}; }
Table load_table(const float *p) { return {p}; }

#if defined(__FMA__) || defined(__aarch64__)

Vec fma(Splat x, const Vec &w, const Vec &acc) {
  Vec v;
  for (int r = 0; r < ROWS; r++) v.row[r] = __builtin_fmaf(x, w.row[r], acc.row[r]);
  return v;
}

#else

// Without a fused multiply-add in the processor a library's takes hundreds of cycles. In double the
// product of two floats is exact, so the sum is rounded once there and once more to float. That is
// wrong only where the first rounding made, or hid, a tie of the second.

// Makes the last bit of an inexact sum odd: then the second rounding is what a single one would be.
float fused_slowly(float a, float b, float c) {
  const double product = static_cast<double>(a) * b, addend = c;
  double sum = product + addend;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  int64_t bits;
  memcpy(&bits, &sum, sizeof bits);
  if ((bits & 1) == 0 && (error > 0 || error < 0)) bits += (error > 0) == (sum > 0) ? 1 : -1;
  memcpy(&sum, &bits, sizeof bits);
  return static_cast<float>(sum);
}

// Half of a float's last bit in a double's mantissa; the exponent of the smallest normal float.
constexpr uint64_t BELOW_FLOAT = 0x1fffffff, TIE = 0x10000000;
constexpr uint64_t EXPONENT = 0x7ff0000000000000, SMALLEST = 0x3810000000000000;

__attribute__((noinline)) Vec fma(Splat x, const Vec &w, const Vec &acc) {
  double sums[ROWS];
  for (int r = 0; r < ROWS; r++) sums[r] = static_cast<double>(x) * w.row[r] + acc.row[r];
  Vec v;
  for (int r = 0; r < ROWS; r++) v.row[r] = static_cast<float>(sums[r]);
  uint64_t bits[ROWS], doubtful = 0;
  memcpy(bits, sums, sizeof bits);
  for (int r = 0; r < ROWS; r++) {
    doubtful |= static_cast<uint64_t>((bits[r] & BELOW_FLOAT) == TIE);
    doubtful |= static_cast<uint64_t>((bits[r] & EXPONENT) < SMALLEST);
  }
  if (doubtful)
    for (int r = 0; r < ROWS; r++) v.row[r] = fused_slowly(x, w.row[r], acc.row[r]);
  return v;
}

#endif

Vec scaled(const Vec &a, const Vec &b) {
  Vec v;
  for (int r = 0; r < ROWS; r++) v.row[r] = a.row[r] * b.row[r];
  return v;
}

// A row's dword holds columns 0..3 in the low nibbles of its bytes and 4..7 in the high ones.
Vec look_up(const Table &table, const Words &words, int i) {
  Vec v;
  for (int r = 0; r < ROWS; r++) v.row[r] = table.values[words.bytes[4 * r + (i & 3)] >> (i & 4) & 15];
  return v;
}

#include "float_tiles.h"

}  // namespace

namespace base {

void widen(const void *from, int64_t stride, int n, int type, float *out) {
  const float *floats = static_cast<const float *>(from);
  const uint16_t *words = static_cast<const uint16_t *>(from);
  if (type == LLMR_F32)
    for (int i = 0; i < n; i++) out[i] = floats[i * stride];
  else if (type == LLMR_F16)
    for (int i = 0; i < n; i++) out[i] = half_to_float(words[i * stride]);
  else
    for (int i = 0; i < n; i++) out[i] = from_bits(static_cast<uint32_t>(words[i * stride]) << 16);
}

void matmul_float(const llmr_weight *w, int p0, int p1, const float *x, int64_t ldx, int t0, int t1,
                  float *out, int64_t ldo, void *scratch) {
  multiply_any(w, p0, p1, x, ldx, t0, t1, out, ldo, scratch);
}

}  // namespace base
}  // namespace llmr
