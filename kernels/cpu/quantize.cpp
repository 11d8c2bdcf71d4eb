// int8 loops over one group at a time, which the compiler turns into vector code; the searches have files of
// their own for each instruction set.
#include "quantize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpuid.h"
#include "float.h"
#include "quantize_rows.h"

namespace llmr {
namespace {

constexpr int MOST = 128;

// fp32 to 16 bits, to nearest even; finite values that fit only.
uint16_t narrow_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t narrow_f16(float value) {
  // Scaled so that the sum with a power of two drops the bits f16 does not have, sub-normals included.
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t exponent = bits >> 23;
  if (exponent < 113) {  // below 2^-14: a multiple of 2^-24
    const float rounded = value + 0.5f;  // 2^-1 has 2^-24 as its last bit
    memcpy(&bits, &rounded, 4);
    return static_cast<uint16_t>(bits - 0x3f000000u);
  }
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>((bits >> 13) - (112 << 10));
}

using Rows = int64_t (*)(const llmr_quantization &, int64_t, int64_t, float *);

Rows rows_for(const char *isa) {
  const auto wanted = [isa](const char *name) { return isa == nullptr || strcmp(isa, name) == 0; };
#if defined(LLMR_X86)
  const Features has = detect();
  if (has.avx512 && wanted("avx512")) return avx512::quantize_rows;
  if (has.avx2_fma_f16c && wanted("avx2")) return avx2::quantize_rows;
#endif
  return wanted("base") ? base::quantize_rows : nullptr;
}

// The scale as the file's type holds it, stored in its place and returned in fp32.
float put_scale(int32_t type, float scale, void *scales, int64_t at) {
  if (type == LLMR_F32) {
    if (scale == 0) scale = 1;
    static_cast<float *>(scales)[at] = scale;
    return scale;
  }
  uint16_t *place = static_cast<uint16_t *>(scales) + at;
  *place = type == LLMR_BF16 ? narrow_bf16(scale) : narrow_f16(scale);
  if (*place == 0) *place = type == LLMR_BF16 ? narrow_bf16(1) : narrow_f16(1);
  float held;
  base::widen(place, 1, 1, type, &held);
  return held;
}

}  // namespace
}  // namespace llmr

int64_t llmr_quantize_int8(int32_t type, const void *weights, int64_t n_groups, int32_t group, uint8_t *codes,
                           void *scales) {
  using namespace llmr;
  const int64_t bytes = type == LLMR_F32 ? 4 : 2;
  for (int64_t g = 0; g < n_groups; g++) {
    float w[MOST];
    base::widen(static_cast<const uint8_t *>(weights) + g * group * bytes, 1, group, type, w);
    float most = 0, strange = 0;  // x - x is 0 for finite x, NaN otherwise
    for (int i = 0; i < group; i++) {
      const float size = fabsf(w[i]);
      most = size > most ? size : most;
      strange += w[i] - w[i];
    }
    if (strange != 0) {
      for (int i = 0; i < group; i++)
        if (!isfinite(w[i])) return g * group + i;
    }
    const float scale = put_scale(type, most / 127, scales, g);
    uint8_t *out = codes + g * group;
    for (int i = 0; i < group; i++) {
      float level = w[i] / scale;
      level = level < -127 ? -127 : level > 127 ? 127 : level;
      // Adding 1.5 * 2^23 leaves no bits behind the point: rounded to nearest even.
      const float rounded = (level + 12582912.0f) - 12582912.0f;
      out[i] = static_cast<uint8_t>(static_cast<int32_t>(rounded) + 128);
    }
  }
  return -1;
}

int64_t llmr_quantize(const llmr_quantization *what, int64_t row0, int64_t row1, const char *isa) {
  using namespace llmr;
  const Rows rows = rows_for(isa);
  if (rows == nullptr) return -3;
  constexpr size_t LINE = 64;
  void *block = malloc(sizeof(float) * ROW_MEMORY + LINE);
  if (block == nullptr) return -2;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(block) + LINE - 1) / LINE * LINE;
  const int64_t bad = rows(*what, row0, row1, reinterpret_cast<float *>(start));
  free(block);
  return bad;
}
