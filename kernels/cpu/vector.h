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
  void normalize(const float *x, const Norm &norm, int n, float *out);                                   \
  void gate_up(const float *gate, const float *up, float *out, int n, int activation);                   \
  void finish(const float *x, const float *bias, float *out, int n);                                     \
  void add(const float *x, const float *bias, float scale, float *out, int n);                           \
  void cap(float *x, int n, float softcap);                                                              \
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

// A gate and what it lets through, both clamped (gpt-oss; the numbers are those of kernels/ops.py). A NaN
// stays one: min and max return their second argument then.
template <class F>
inline F swiglu_clamped(F gate, F up) {
  constexpr float CLAMP = 7.0f, SLOPE = 1.702f;
  gate = F::min(F::set1(CLAMP), gate);
  up = F::max(F::set1(-CLAMP), F::min(F::set1(CLAMP), up));
  return gate / (F::set1(1.0f) + exp(gate * F::set1(-SLOPE))) * (up + F::set1(1.0f));
}

// ---- functions of a row -----------------------------------------------------------------------------

// out[i] = f(x[i])
template <class F, class Function>
inline void map(const float *x, float *out, int n, Function f) {
  const int whole = n / F::W * F::W, rest = n - whole;
  for (int i = 0; i < whole; i += F::W) F::store(out + i, f(F::load(x + i)));
  if (rest > 0) store_part<F>(out + whole, f(load_part<F>(x + whole, rest)), rest);
}

// out[i] = f(x[i], y[i])
template <class F, class Function>
inline void map(const float *x, const float *y, float *out, int n, Function f) {
  const int whole = n / F::W * F::W, rest = n - whole;
  for (int i = 0; i < whole; i += F::W) F::store(out + i, f(F::load(x + i), F::load(y + i)));
  if (rest > 0)
    store_part<F>(out + whole, f(load_part<F>(x + whole, rest), load_part<F>(y + whole, rest)), rest);
}

// The sum of n values, each added to one of four by sum = more(x, sum).
template <class F, class More>
inline float sum_by(const float *x, int n, More more) {
  const int whole = n / F::W * F::W, rest = n - whole;
  F sums[4] = {F::set1(0), F::set1(0), F::set1(0), F::set1(0)};
  int i = 0;
  for (; i + 4 * F::W <= n; i += 4 * F::W)
    for (int j = 0; j < 4; j++) sums[j] = more(F::load(x + i + j * F::W), sums[j]);
  for (; i < whole; i += F::W) sums[0] = more(F::load(x + i), sums[0]);
  if (rest > 0) sums[1] = F::keep(more(load_part<F>(x + whole, rest), sums[1]), 0, rest, sums[1]);
  return F::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// ---- the table --------------------------------------------------------------------------------------

template <class F>
inline void normalize(const float *x, const Norm &norm, int n, float *out) {
  const bool is_centered = norm.kind == LLMR_LAYER_NORM;
  float middle = 0.0f, squares;
  if (is_centered) {
    middle = sum_by<F>(x, n, [](F v, F sum) { return sum + v; }) / static_cast<float>(n);
    squares = sum_by<F>(x, n, [=](F v, F sum) {
      const F apart = v - F::set1(middle);
      return F::fma(apart, apart, sum);
    });
  } else {
    squares = sum_by<F>(x, n, [](F v, F sum) { return F::fma(v, v, sum); });
  }
  const float mean = squares / static_cast<float>(n);
  const F factor = F::set1(1.0f) / F::sqrt(F::set1(mean + norm.eps));
  const F from = F::set1(middle), shift = F::set1(norm.offset);
  map<F>(x, norm.gamma, out, n, [=](F v, F gamma) { return (v - from) * factor * (gamma + shift); });
  if (norm.beta != nullptr) map<F>(out, norm.beta, out, n, [](F v, F beta) { return v + beta; });
}

template <class F>
inline void gate_up(const float *gate, const float *up, float *out, int n, int activation) {
  if (activation == LLMR_SWIGLU_CLAMPED)
    map<F>(gate, up, out, n, [](F g, F u) { return swiglu_clamped(g, u); });
  else if (gate == nullptr && activation == LLMR_SILU)
    map<F>(up, out, n, [](F u) { return silu(u); });
  else if (gate == nullptr)
    map<F>(up, out, n, [](F u) { return gelu_tanh(u); });
  else if (activation == LLMR_SILU)
    map<F>(gate, up, out, n, [](F g, F u) { return silu(g) * u; });
  else
    map<F>(gate, up, out, n, [](F g, F u) { return gelu_tanh(g) * u; });
}

template <class F>
inline void finish(const float *x, const float *bias, float *out, int n) {
  if (bias != nullptr)
    map<F>(x, bias, out, n, [](F v, F b) { return v + b; });
  else
    __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
}

template <class F>
inline void add(const float *x, const float *bias, float scale, float *out, int n) {
  const F by = F::set1(scale);
  const int whole = n / F::W * F::W;
  for (int i = 0; i < whole; i += F::W) {
    F v = F::load(x + i);
    if (bias != nullptr) v = v + F::load(bias + i);
    F::store(out + i, F::load(out + i) + v * by);
  }
  for (int i = whole; i < n; i++) out[i] += (bias != nullptr ? x[i] + bias[i] : x[i]) * scale;
}

template <class F>
inline void cap(float *x, int n, float softcap) {
  const F by = F::set1(softcap);
  map<F>(x, x, n, [=](F v) { return tanh(v / by) * by; });
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
