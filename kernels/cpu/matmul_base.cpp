// The integer matmul in plain C++: the definition that the other instruction sets match bit for bit.
// Codes are [tokens][k_padded], int8 beside W4 and LUT8, int16 beside W8.
#include <math.h>
#include <string.h>

#include "matmul.h"

namespace llmr {
namespace {

// Exact: a subnormal half is a normal float.
float from_half(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  uint32_t bits;
  float value;
  if (exponent == 0) {
    value = float(mantissa) * 0x1p-24f;
    return h >> 15 ? -value : value;
  }
  bits = uint32_t(h >> 15) << 31 | uint32_t(exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
  memcpy(&value, &bits, 4);
  return value;
}

// Element i of scales or mins.
float element(const void *values, int type, int64_t i) {
  if (type == LLMR_F32) return static_cast<const float *>(values)[i];
  const uint16_t bits = static_cast<const uint16_t *>(values)[i];
  if (type == LLMR_F16) return from_half(bits);
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// The group's largest magnitude; not finite if one value is not.
float absmax(const float *x, int n) {
  float largest = 0;
  for (int i = 0; i < n; i++) {
    const float magnitude = fabsf(x[i]);
    if (!(magnitude <= largest)) largest = magnitude;
    if (largest != largest) break;
  }
  return largest;
}

// What a code of four bits weighs before it is scaled.
void four_bit_levels(const llmr_weight &w, int *levels) {
  for (int u = 0; u < 16; u++) levels[u] = w.kind == LLMR_LUT8 ? w.levels[u] : w.mins ? u : u - 8;
}

// A minimum whose row's scale is `scale`.
float minimum(const llmr_weight &w, int64_t i, float scale) {
  if (w.min_type == LLMR_U8) return -(scale * float(static_cast<const uint8_t *>(w.mins)[i]));
  return element(w.mins, w.min_type, i);
}

// 16 rows of one panel for one token. A is the type of the activation codes.
template <class A>
void panel_product(const llmr_weight &w, int panel, const Acts &acts, int t, float *out) {
  const bool w4 = w.kind != LLMR_W8;
  const int step = w4 ? 8 : 4;  // columns of 64 bytes of the panel: 4 bytes a row
  const int zero = w.mins ? 0 : 128;
  const float unit = w.kind == LLMR_LUT8 ? w.unit : 1.f;
  int levels[16];
  four_bit_levels(w, levels);
  const int64_t scales = int64_t(panel) * (w.k_padded / w.group) * ROWS;

  // Group g of the panel times the same group of a token's codes.
  const auto add_group = [&](int g, const Acts &acts) {
    const uint8_t *codes = w.codes + (int64_t(panel) * w.k_padded + int64_t(g) * acts.group) / step * 64;
    const A *a = reinterpret_cast<const A *>(acts.codes) + int64_t(t) * acts.k_padded + int64_t(g) * acts.group;
    int32_t dots[ROWS] = {};
    for (int k = 0; k < acts.group; k += step, a += step, codes += 64) {
      for (int row = 0; row < ROWS; row++) {
        for (int b = 0; b < 4; b++) {
          const int byte = codes[4 * row + b];
          if (w4) {
            dots[row] += levels[byte & 15] * a[b] + levels[byte >> 4] * a[4 + b];
          } else {
            dots[row] += (byte - zero) * a[b];
          }
        }
      }
    }
    const float scale = acts.scale[int64_t(g) * acts.tokens + t];
    const float sum = acts.sum[int64_t(g) * acts.tokens + t];
    const int64_t first = scales + int64_t(g) * acts.group / w.group * ROWS;
    for (int row = 0; row < ROWS; row++) {
      const float ws = element(w.scales, w.type, first + row) * unit;
      out[row] = fmaf(float(dots[row]), ws * scale, out[row]);
      if (w.mins) out[row] = fmaf(minimum(w, first + row, ws), sum, out[row]);
    }
  };
  for (int row = 0; row < ROWS; row++) out[row] = 0;
  for (int g = 0; g < acts.k_padded / acts.group; g++) add_group(g, acts);
  int32_t refined[MOST_GROUPS];
  const int n = refined_groups(acts, t, t + 1, refined);
  for (int i = 0; i < n; i++) add_group(refined[i], *acts.fine);
}

// One token: codes, scales and sums of all groups. `largest` is the greatest code.
template <class A>
void quantize_token(const float *x, int t, float largest, Acts *acts) {
  for (int g = 0; g < acts->k_padded / acts->group; g++) {
    const int k0 = g * acts->group;
    const int n = acts->k - k0 < acts->group ? acts->k - k0 : acts->group;  // may be negative
    const float top = absmax(x + k0, n);
    A *codes = reinterpret_cast<A *>(acts->codes) + int64_t(t) * acts->k_padded + k0;
    memset(codes, 0, sizeof(A) * acts->group);
    int32_t sum = 0;
    if (top >= TINY && top <= __FLT_MAX__) {
      const float inverse = largest / top;
      for (int i = 0; i < n; i++) {
        codes[i] = A(lrintf(x[k0 + i] * inverse));
        sum += codes[i];
      }
    }
    const int64_t a = int64_t(g) * acts->tokens + t;
    acts->scale[a] = top < TINY ? 0 : top / largest;
    acts->sum[a] = acts->scale[a] * float(sum);
  }
}

}  // namespace

namespace base {

size_t codes_bytes(int kind, int tokens, int k_padded) {
  return size_t(tokens) * k_padded * (kind == LLMR_W4 ? sizeof(int8_t) : sizeof(int16_t));
}

size_t init_bytes(int, int, int, int) { return 0; }

void quantize(const float *x, int64_t ldx, int t0, int t1, Acts *acts) {
  for (int t = t0; t < t1; t++) {
    const float *row = x + (t - t0) * ldx;
    if (acts->kind == LLMR_W4) {
      quantize_token<int8_t>(row, t, 127, acts);
    } else {
      quantize_token<int16_t>(row, t, W8_LIMIT, acts);
    }
  }
}

void matmul(const llmr_weight *w, int p0, int p1, const Acts *acts, int t0, int t1, float *out, int64_t ldo,
            void *) {
  for (int p = p0; p < p1; p++) {
    for (int t = t0; t < t1; t++) {
      float *to = out + (t - t0) * ldo + ROWS * (p - p0);
      if (w->kind != LLMR_W8) {
        panel_product<int8_t>(*w, p, *acts, t, to);
      } else {
        panel_product<int16_t>(*w, p, *acts, t, to);
      }
    }
  }
}

}  // namespace base
}  // namespace llmr
