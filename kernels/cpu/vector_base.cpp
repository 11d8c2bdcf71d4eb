// Vector functions for any machine: 4 lanes, in the compiler's own vector type.
#include "attend_decode.h"
#include "attend_prefill.h"

namespace llmr {
namespace {

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(16)));

inline Floats as_floats(Ints x) { return reinterpret_cast<Floats>(x); }
inline Ints as_ints(Floats x) { return reinterpret_cast<Ints>(x); }
inline Floats pick(Ints mask, Floats x, Floats y) {
  return as_floats((mask & as_ints(x)) | (~mask & as_ints(y)));
}

struct F {
  static constexpr int W = 4, ROWS = 6, DECODE_ROWS = 3;
  Floats v;

  static F set1(float x) { return {Floats{x, x, x, x}}; }
  static F load(const float *x) {
    F out;
    __builtin_memcpy(&out.v, x, sizeof out.v);
    return out;
  }
  static void store(float *out, F x) { __builtin_memcpy(out, &x.v, sizeof x.v); }

  // f16 by its bits. Nothing on the way is a subnormal float, which workers would flush to 0.
  static F load_half(const uint16_t *x) {
    const Ints half = {x[0], x[1], x[2], x[3]};
    const Ints bits = (half & 0x7fff) << 13, exponent = bits & 0x0f800000;
    const Floats tiny = as_floats(bits + (113 << 23)) - as_floats(Ints{} + (113 << 23));
    const Floats normal = as_floats(bits + (112 << 23));
    const Floats infinite = as_floats(bits + (224 << 23));
    const Floats value = pick(exponent == 0, tiny, pick(exponent == 0x0f800000, infinite, normal));
    return {as_floats(as_ints(value) | ((half & 0x8000) << 16))};
  }
  static void store_half(uint16_t *out, F x) {
    const Ints all = as_ints(x.v), bits = all & 0x7fffffff, odd = (bits >> 13) & 1;
    // Adding 0.5 leaves the value in units of 2^-24, those of subnormal halves, in the low bits.
    const Ints tiny = as_ints(as_floats(bits) + 0.5f) - (126 << 23);
    const Ints normal = (bits - (112 << 23) + 0xfff + odd) >> 13;
    const Ints special = (bits > 0x7f800000) & 0x0200;
    const Ints is_tiny = bits < (113 << 23), is_large = bits >= 0x477ff000;  // 65520: rounds to infinity
    Ints half = (is_tiny & tiny) | (~is_tiny & normal);
    half = (is_large & (special | 0x7c00)) | (~is_large & half);
    half |= (all >> 16) & 0x8000;
    for (int i = 0; i < 4; i++) out[i] = static_cast<uint16_t>(half[i]);
  }

  static F fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
  static F sqrt(F x) {
    for (int i = 0; i < 4; i++) x.v[i] = __builtin_sqrtf(x.v[i]);
    return x;
  }
  static F max(F a, F b) { return {pick(a.v > b.v, a.v, b.v)}; }
  static F min(F a, F b) { return {pick(a.v < b.v, a.v, b.v)}; }
  static F select(F a, F b, F x, F y) { return {pick(a.v < b.v, x.v, y.v)}; }
  static F scale(F x, F, F bits) {
    // MAGIC has zeros where n is shifted to; an exponent below 1 is negative here and becomes 0.
    const Ints power = (as_ints(bits.v) << 23) + (127 << 23);
    return {x.v * as_floats(power & ~(power >> 31))};
  }
  static uint32_t equal(F a, F b) {
    const Ints same = a.v == b.v;
    return static_cast<uint32_t>((same[0] & 1) | (same[1] & 2) | (same[2] & 4) | (same[3] & 8));
  }
  static float sum(F x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }
  static float largest(F x) {
    const float a = x.v[0] > x.v[1] ? x.v[0] : x.v[1], b = x.v[2] > x.v[3] ? x.v[2] : x.v[3];
    return a > b ? a : b;
  }

  static F quad(F a, F b, F c, F d) {
    F x[] = {a, b, c, d};
    transpose(x);
    return {(x[0].v + x[2].v) + (x[1].v + x[3].v)};
  }
  static F join(const F (&q)[1]) { return q[0]; }
  static void transpose(F (&x)[4]) {
    const Floats a = mix(x[0].v, x[1].v, Ints{0, 4, 1, 5}), b = mix(x[0].v, x[1].v, Ints{2, 6, 3, 7});
    const Floats c = mix(x[2].v, x[3].v, Ints{0, 4, 1, 5}), d = mix(x[2].v, x[3].v, Ints{2, 6, 3, 7});
    x[0].v = mix(a, c, Ints{0, 1, 4, 5}), x[1].v = mix(a, c, Ints{2, 3, 6, 7});
    x[2].v = mix(b, d, Ints{0, 1, 4, 5}), x[3].v = mix(b, d, Ints{2, 3, 6, 7});
  }

  static F keep(F x, int first, int last, F other) {
    const Ints lane = {0, 1, 2, 3};
    return {pick((lane >= first) & (lane < last), x.v, other.v)};
  }

  struct Wide {
    Doubles low, high;
  };
  static void add(Wide &sums, F x) {
    sums.low += Doubles{x.v[0], x.v[1]};
    sums.high += Doubles{x.v[2], x.v[3]};
  }
  static double sum(const Wide &sums) { return (sums.low[0] + sums.low[1]) + (sums.high[0] + sums.high[1]); }

 private:
  // Lanes of a (0..3) and b (4..7).
  static Floats mix(Floats a, Floats b, Ints lanes) {
#if defined(__clang__)
    Floats out;
    for (int i = 0; i < 4; i++) out[i] = lanes[i] < 4 ? a[lanes[i]] : b[lanes[i] - 4];
    return out;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
  }
};

inline F operator+(F a, F b) { return {a.v + b.v}; }
inline F operator-(F a, F b) { return {a.v - b.v}; }
inline F operator*(F a, F b) { return {a.v * b.v}; }
inline F operator/(F a, F b) { return {a.v / b.v}; }

}  // namespace

namespace base {
#include "vector_functions.h"
}
}  // namespace llmr
