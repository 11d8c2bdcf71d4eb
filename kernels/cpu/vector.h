// Vector functions of the table that are not matmul, written once over a vector of floats F. Each
// vector_*.cpp defines F for its instruction set in an anonymous namespace, which makes every
// instance of these templates private to that file.
//
// F has W lanes. Operators + - * / work by lane; besides:
//   load store load_half store_half  W values in memory, unaligned; half: f16, rounded to even
//   fma(a, b, c) sqrt set1           fma may round twice where the machine cannot fuse
//   max(a, b) min(a, b)              b where one of them is NaN
//   select(a, b, x, y)               a < b ? x : y
//   scale(x, n, bits)                x * 2^n, 0 below 2^-126; `bits` is MAGIC + n as a float
//   sum(x) largest(x)                over the lanes
//   equal(a, b)                      bit mask of lanes
//   quad join transpose keep         see attend.h
//   Wide add sum                     W sums in double
#pragma once
#include "kernels.h"

namespace llmr {

struct AttendTile;

// What each vector_*.cpp provides; kernels.h says what each function does.
#define LLMR_VECTOR_FUNCTIONS                                                                             \
  void rms_norm(const float *x, const float *gamma, float eps, float offset, int n, float *out);         \
  void gate_up(const float *gate, const float *up, float *out, int n, int activation);                   \
  void finish(const float *x, const float *bias, float *out, int n, bool adds);                          \
  void rotate(float *head, const float *cos, const float *sin, int n_freq);                              \
  void store(const float *x, void *out, int n, int type);                                                \
  void attend(const AttendTile *tile, void *scratch);                                                    \
  void attend_chunk(const AttendTile *tile, int chunk, float *partial, void *scratch);                   \
  void attend_merge(const AttendTile *tile, const float *partials);                                      \
  bool largest(const float *x, int n, float *value, int *index);                                         \
  double sum_exp(const float *x, int n, float shift);

namespace base {
LLMR_VECTOR_FUNCTIONS
}
namespace avx2 {
LLMR_VECTOR_FUNCTIONS
}
namespace avx512 {
LLMR_VECTOR_FUNCTIONS
}
#undef LLMR_VECTOR_FUNCTIONS

// ---- parts of a vector ------------------------------------------------------------------------------

// The first n < W values; the other lanes are 0.
template <class F>
inline F load_part(const float *x, int n) {
  float lanes[F::W] = {};
  for (int i = 0; i < n; i++) lanes[i] = x[i];
  return F::load(lanes);
}

template <class F>
inline void store_part(float *out, F x, int n) {
  float lanes[F::W];
  F::store(lanes, x);
  for (int i = 0; i < n; i++) out[i] = lanes[i];
}

// The same of f16.
template <class F>
inline F load_part(const uint16_t *x, int n) {
  uint16_t lanes[F::W] = {};
  for (int i = 0; i < n; i++) lanes[i] = x[i];
  return F::load_half(lanes);
}

template <class F>
inline void store_half_part(uint16_t *out, F x, int n) {
  uint16_t lanes[F::W];
  F::store_half(lanes, x);
  for (int i = 0; i < n; i++) out[i] = lanes[i];
}

// ---- functions of a lane ----------------------------------------------------------------------------

// Added to a small number, leaves its nearest integer in the low bits of the sum.
constexpr float MAGIC = 12582912.0f;

// e^x for x <= 89, with a relative error below 2e-7; 0 below -87.4, NaN for NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; the polynomial was fitted to (e^r - 1 - r) / r^2.
template <class F>
inline F exp_capped(F x) {
  x = F::max(F::set1(-104.0f), x);
  const F bits = F::fma(x, F::set1(1.44269504f), F::set1(MAGIC));
  const F n = bits - F::set1(MAGIC);
  // ln 2 in two parts, the first so short that n times it is exact.
  const F r = F::fma(n, F::set1(2.12194440e-4f), F::fma(n, F::set1(-0.693359375f), x));
  F p = F::fma(r, F::set1(1.38131448e-3f), F::set1(8.36941879e-3f));
  p = F::fma(p, r, F::set1(4.16684560e-2f));
  p = F::fma(p, r, F::set1(0.166665152f));
  p = F::fma(p, r, F::set1(0.499999940f));
  p = F::fma(p, r, F::set1(1.0f));
  return F::scale(F::fma(p, r, F::set1(1.0f)), n, bits);
}

// The same for any x; infinite above 88.8.
template <class F>
inline F exp(F x) {
  return exp_capped(F::min(F::set1(89.0f), x));
}

// tanh, accurate near 0 too: softcapped scores are mostly small.
template <class F>
inline F tanh(F x) {
  const F square = x * x;
  F p = F::fma(square, F::set1(-5.66078769e-3f), F::set1(2.06020065e-2f));
  p = F::fma(p, square, F::set1(-5.37292287e-2f));
  p = F::fma(p, square, F::set1(0.133313283f));
  p = F::fma(p, square, F::set1(-0.333332777f));
  const F small = F::fma(p * square, x, x);
  const F large = F::set1(1.0f) - F::set1(2.0f) / (exp(x + x) + F::set1(1.0f));
  return F::select(square, F::set1(0.4f), small, large);
}

template <class F>
inline F silu(F x) {
  return x / (F::set1(1.0f) + exp(F::set1(0.0f) - x));
}

// x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), as x / (1 + e^-2u): nothing cancels.
template <class F>
inline F gelu_tanh(F x) {
  const F minus_2u = x * F::fma(x * x, F::set1(-0.0713548163f), F::set1(-1.59576912f));
  return x / (F::set1(1.0f) + exp(minus_2u));
}

// ---- the table --------------------------------------------------------------------------------------

template <class F>
inline void rms_norm(const float *x, const float *gamma, float eps, float offset, int n, float *out) {
  const int whole = n / F::W * F::W, rest = n - whole;
  F sums[4] = {F::set1(0), F::set1(0), F::set1(0), F::set1(0)};
  int i = 0;
  for (; i + 4 * F::W <= n; i += 4 * F::W)
    for (int j = 0; j < 4; j++) {
      const F v = F::load(x + i + j * F::W);
      sums[j] = F::fma(v, v, sums[j]);
    }
  for (; i < whole; i += F::W) {
    const F v = F::load(x + i);
    sums[0] = F::fma(v, v, sums[0]);
  }
  const F last = load_part<F>(x + whole, rest);
  sums[1] = F::fma(last, last, sums[1]);
  const float mean = F::sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(n);
  const F factor = F::set1(1.0f) / F::sqrt(F::set1(mean + eps));
  const F shift = F::set1(offset);
  for (i = 0; i < whole; i += F::W)
    F::store(out + i, F::load(x + i) * factor * (F::load(gamma + i) + shift));
  if (rest > 0)
    store_part<F>(out + whole, last * factor * (load_part<F>(gamma + whole, rest) + shift), rest);
}

template <class F>
inline void gate_up(const float *gate, const float *up, float *out, int n, int activation) {
  const int whole = n / F::W * F::W, rest = n - whole;
  const bool is_silu = activation == LLMR_SILU;
  for (int i = 0; i < whole; i += F::W) {
    const F x = F::load(gate + i);
    F::store(out + i, (is_silu ? silu(x) : gelu_tanh(x)) * F::load(up + i));
  }
  if (rest > 0) {
    const F x = load_part<F>(gate + whole, rest);
    store_part<F>(out + whole, (is_silu ? silu(x) : gelu_tanh(x)) * load_part<F>(up + whole, rest), rest);
  }
}

template <class F>
inline void finish(const float *x, const float *bias, float *out, int n, bool adds) {
  const int whole = n / F::W * F::W;
  for (int i = 0; i < whole; i += F::W) {
    F v = F::load(x + i);
    if (bias != nullptr) v = v + F::load(bias + i);
    F::store(out + i, adds ? F::load(out + i) + v : v);
  }
  for (int i = whole; i < n; i++) {
    const float v = bias != nullptr ? x[i] + bias[i] : x[i];
    out[i] = adds ? out[i] + v : v;
  }
}

template <class F>
inline void rotate(float *head, const float *cos, const float *sin, int n_freq) {
  const int whole = n_freq / F::W * F::W;
  float *other = head + n_freq;
  for (int i = 0; i < whole; i += F::W) {
    const F left = F::load(head + i), right = F::load(other + i);
    const F c = F::load(cos + i), s = F::load(sin + i);
    F::store(head + i, left * c - right * s);
    F::store(other + i, right * c + left * s);
  }
  for (int i = whole; i < n_freq; i++) {
    const float left = head[i], right = other[i];
    head[i] = left * cos[i] - right * sin[i];
    other[i] = right * cos[i] + left * sin[i];
  }
}

template <class F>
inline void store(const float *x, void *out, int n, int type) {
  if (type == LLMR_F32) {
    __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  uint16_t *halves = static_cast<uint16_t *>(out);
  const int whole = n / F::W * F::W;
  for (int i = 0; i < whole; i += F::W) F::store_half(halves + i, F::load(x + i));
  if (whole < n) store_half_part<F>(halves + whole, load_part<F>(x + whole, n - whole), n - whole);
}

template <class F>
inline bool largest(const float *x, int n, float *value, int *index) {
  const int whole = n / F::W * F::W;
  F best = F::set1(x[0]);
  F zero = F::set1(0.0f);  // becomes NaN with the first value that is not finite
  for (int i = 0; i < whole; i += F::W) {
    const F v = F::load(x + i);
    best = F::max(best, v);
    zero = F::fma(v, F::set1(0.0f), zero);
  }
  float most = F::largest(best), check = F::sum(zero);
  for (int i = whole; i < n; i++) {
    if (x[i] > most) most = x[i];
    check += x[i] * 0.0f;
  }
  if (!(check == 0.0f)) return false;
  int at = 0;
  const F wanted = F::set1(most);
  while (at < whole && F::equal(F::load(x + at), wanted) == 0) at += F::W;
  while (x[at] != most) at++;
  *value = x[at];
  *index = at;
  return true;
}

template <class F>
inline double sum_exp(const float *x, int n, float shift) {
  const int whole = n / F::W * F::W;
  const F by = F::set1(shift);
  typename F::Wide sums = {};
  for (int i = 0; i < whole; i += F::W) F::add(sums, exp(F::load(x + i) - by));
  double total = F::sum(sums);
  if (whole < n) {
    float rest[F::W];
    F::store(rest, exp(load_part<F>(x + whole, n - whole) - by));
    for (int i = 0; i < n - whole; i++) total += static_cast<double>(rest[i]);
  }
  return total;
}

}  // namespace llmr
