// Layouts of the blocks as the ggml project defines them (ggml-common.h). Plain loops over fixed
// counts: the compiler turns them into vector code for whatever the file is compiled for.
#include "gguf.h"

#include <string.h>

#define RESTRICT __restrict

namespace llmr {
namespace {

uint16_t word(const uint8_t *p) {
  uint16_t value;
  memcpy(&value, p, sizeof value);
  return value;
}

float number(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

float widen(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half & 0x7C00, rest = half & 0x7FFF;
  if (exponent == 0x7C00) return number(sign | 0x7F800000 | rest << 13);
  // By way of an integer, as a thread may be set to take subnormal fp32 numbers for zero.
  if (exponent == 0) return number(sign | bits_of((float)rest * 0x1p-24f));
  return number(sign | ((rest << 13) + (112u << 23)));
}

// To nearest even, without branches. Subnormals: 0.5 has exactly their step in its last place.
uint16_t narrow(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  const uint32_t subnormal = bits_of(number(magnitude) + 0.5f) - 0x3F000000;
  const uint32_t special = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  return (uint16_t)((magnitude < 0x477FF000 ? finite : special) | (bits >> 16 & 0x8000));
}

// Writes scales or minima of one precision and counts those that are not finite.
template <int N>
int put(const float *RESTRICT values, uint16_t *RESTRICT out) {
  int bad = 0;
  for (int i = 0; i < N; i++) {
    out[i] = narrow(values[i]);
    bad += (out[i] & 0x7C00) == 0x7C00;
  }
  return bad;
}

template <int N>
int put(const float *RESTRICT values, float *RESTRICT out) {
  int bad = 0;
  for (int i = 0; i < N; i++) {
    out[i] = values[i];
    bad += (bits_of(values[i]) & 0x7F800000) == 0x7F800000;
  }
  return bad;
}

// One scale or minimum that the file has as f16: its bits stay what they are.
int put_half(const uint8_t *half, uint16_t *out) {
  *out = word(half);
  return (*out & 0x7C00) == 0x7C00;
}

// The two-bit codes at SHIFT of 32 bytes: 16 bytes with the even column low.
template <int SHIFT>
void pair_crumbs(const uint8_t *RESTRICT in, uint8_t *RESTRICT out) {
  for (int i = 0; i < 16; i++) {
    const uint16_t two = word(in + 2 * i) >> SHIFT & 0x0303;
    out[i] = (uint8_t)(two | two >> 4);
  }
}

// The same with a third bit, at BIT of 32 other bytes, and 4 more.
template <int SHIFT, int BIT>
void pair_crumbs(const uint8_t *RESTRICT in, const uint8_t *RESTRICT high, uint8_t *RESTRICT out) {
  for (int i = 0; i < 16; i++) {
    const uint16_t low = word(in + 2 * i) >> SHIFT & 0x0303, third = word(high + 2 * i) >> BIT & 0x0101;
    const uint16_t two = (uint16_t)((low | third << 2) + 0x0404);
    out[i] = (uint8_t)(two | two >> 4);
  }
}

// N bytes, whose low nibbles are columns 0..N-1 and whose high nibbles are columns N..2N-1: each half
// becomes N/2 bytes with the even column low.
template <int N>
void pair_nibbles(const uint8_t *RESTRICT in, uint8_t *RESTRICT out) {
  for (int i = 0; i < N / 2; i++) {
    const uint16_t two = word(in + 2 * i);
    out[i] = (uint8_t)((two & 0x0F) | (two >> 4 & 0xF0));
    out[N / 2 + i] = (uint8_t)((two >> 4 & 0x0F) | (two >> 8 & 0xF0));
  }
}

// 32 nibbles of 16 bytes with a fifth bit each, plus `offset`. Bit i of `high` belongs to column i.
void join_fifth_bits(const uint8_t *RESTRICT nibbles, const uint8_t *RESTRICT high, int offset,
                     uint8_t *RESTRICT out) {
  uint8_t fifth[32];
  for (int byte = 0; byte < 4; byte++)
    for (int bit = 0; bit < 8; bit++) fifth[8 * byte + bit] = (uint8_t)((high[byte] >> bit & 1) << 4);
  for (int i = 0; i < 16; i++) {
    out[i] = (uint8_t)(((nibbles[i] & 15) | fifth[i]) + offset);
    out[16 + i] = (uint8_t)((nibbles[i] >> 4 | fifth[16 + i]) + offset);
  }
}

// The 8 scales and minima of Q4_K and Q5_K: f16 d and dmin, then 6 bits of each sub-block in 12 bytes.
template <typename S>
int scales_and_mins(const uint8_t *block, S *scales, S *mins) {
  const float d = widen(word(block)), dmin = widen(word(block + 2));
  const uint8_t *packed = block + 4;
  float scale[8], min[8];
  for (int j = 0; j < 4; j++) {
    const uint8_t low = packed[j], high = packed[4 + j], both = packed[8 + j];
    scale[j] = d * (float)(low & 63);
    min[j] = -(dmin * (float)(high & 63));
    scale[4 + j] = d * (float)((both & 15) | (low >> 6) << 4);
    min[4 + j] = -(dmin * (float)(both >> 4 | (high >> 6) << 4));
  }
  return put<8>(scale, scales) + put<8>(min, mins);
}

// A layout has the sizes of a block and of its codes, how many scales it has, whether as many minima,
// and unpacks one block, returning the number of scales and minima that are not finite.
struct Q4_0 {
  static constexpr int BYTES = 18, CODES = 16, SCALES = 1;
  static constexpr bool MINS = false;
  static int unpack(const uint8_t *block, uint8_t *codes, uint16_t *scales, uint16_t *) {
    pair_nibbles<16>(block + 2, codes);
    return put_half(block, scales);
  }
};

struct Q4_1 {
  static constexpr int BYTES = 20, CODES = 16, SCALES = 1;
  static constexpr bool MINS = true;
  static int unpack(const uint8_t *block, uint8_t *codes, uint16_t *scales, uint16_t *mins) {
    pair_nibbles<16>(block + 4, codes);
    return put_half(block, scales) + put_half(block + 2, mins);
  }
};

struct Q5_0 {
  static constexpr int BYTES = 22, CODES = 32, SCALES = 1;
  static constexpr bool MINS = false;
  static int unpack(const uint8_t *block, uint8_t *codes, uint16_t *scales, uint16_t *) {
    join_fifth_bits(block + 6, block + 2, 128 - 16, codes);
    return put_half(block, scales);
  }
};

struct Q5_1 {
  static constexpr int BYTES = 24, CODES = 32, SCALES = 1;
  static constexpr bool MINS = true;
  static int unpack(const uint8_t *block, uint8_t *codes, uint16_t *scales, uint16_t *mins) {
    join_fifth_bits(block + 8, block + 4, 0, codes);
    return put_half(block, scales) + put_half(block + 2, mins);
  }
};

struct Q8_0 {
  static constexpr int BYTES = 34, CODES = 32, SCALES = 1;
  static constexpr bool MINS = false;
  static int unpack(const uint8_t *block, uint8_t *codes, uint16_t *scales, uint16_t *) {
    for (int i = 0; i < 32; i++) codes[i] = block[2 + i] ^ 0x80;  // signed -> + 128
    return put_half(block, scales);
  }
};

struct Q4_K {
  static constexpr int BYTES = 144, CODES = 128, SCALES = 8;
  static constexpr bool MINS = true;
  template <typename S>
  static int unpack(const uint8_t *block, uint8_t *codes, S *scales, S *mins) {
    for (int chunk = 0; chunk < 128; chunk += 32) pair_nibbles<32>(block + 16 + chunk, codes + chunk);
    return scales_and_mins(block, scales, mins);
  }
};

struct Q5_K {
  static constexpr int BYTES = 176, CODES = 256, SCALES = 8;
  static constexpr bool MINS = true;
  template <typename S>
  static int unpack(const uint8_t *RESTRICT block, uint8_t *RESTRICT codes, S *scales, S *mins) {
    const uint8_t *fifth = block + 16, *nibbles = block + 48;
    for (int chunk = 0; chunk < 4; chunk++) {  // bit j of fifth[i]: column i of sub-block j
      for (int i = 0; i < 32; i++) {
        const uint8_t pair = (uint8_t)(fifth[i] >> 2 * chunk);
        codes[64 * chunk + i] = (uint8_t)((nibbles[32 * chunk + i] & 15) | (pair & 1) << 4);
        codes[64 * chunk + 32 + i] = (uint8_t)(nibbles[32 * chunk + i] >> 4 | (pair & 2) << 3);
      }
    }
    return scales_and_mins(block, scales, mins);
  }
};

struct Q6_K {
  static constexpr int BYTES = 210, CODES = 256, SCALES = 16;
  static constexpr bool MINS = false;
  template <typename S>
  static int unpack(const uint8_t *RESTRICT block, uint8_t *RESTRICT codes, S *scales, S *) {
    for (int half = 0; half < 2; half++) {
      const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
      uint8_t *out = codes + 128 * half;
      for (int i = 0; i < 32; i++) {
        const uint8_t first = low[i], second = low[32 + i], bits = high[i];
        out[i] = (uint8_t)(((first & 15) | (bits << 4 & 0x30)) + 128 - 32);
        out[32 + i] = (uint8_t)(((second & 15) | (bits << 2 & 0x30)) + 128 - 32);
        out[64 + i] = (uint8_t)((first >> 4 | (bits & 0x30)) + 128 - 32);
        out[96 + i] = (uint8_t)((second >> 4 | (bits >> 2 & 0x30)) + 128 - 32);
      }
    }
    const float d = widen(word(block + 208));
    float scale[16];
    for (int j = 0; j < 16; j++) scale[j] = d * (float)(int8_t)block[192 + j];
    return put<16>(scale, scales);
  }
};

struct Q2_K {
  static constexpr int BYTES = 84, CODES = 128, SCALES = 16;
  static constexpr bool MINS = true;
  template <typename S>
  static int unpack(const uint8_t *block, uint8_t *codes, S *scales, S *mins) {
    for (int half = 0; half < 2; half++) {
      const uint8_t *in = block + 16 + 32 * half;
      uint8_t *out = codes + 64 * half;
      pair_crumbs<0>(in, out);
      pair_crumbs<2>(in, out + 16);
      pair_crumbs<4>(in, out + 32);
      pair_crumbs<6>(in, out + 48);
    }
    const float d = widen(word(block + 80)), dmin = widen(word(block + 82));
    float scale[16], min[16];
    for (int j = 0; j < 16; j++) scale[j] = d * (float)(block[j] & 15);
    for (int j = 0; j < 16; j++) min[j] = -(dmin * (float)(block[j] >> 4));
    const int bad = put<16>(scale, scales);
    return bad + put<16>(min, mins);
  }
};

struct Q3_K {
  static constexpr int BYTES = 110, CODES = 128, SCALES = 16;
  static constexpr bool MINS = false;
  template <typename S>
  static int unpack(const uint8_t *block, uint8_t *codes, S *scales, S *) {
    // A weight is its two bits, less 4 where its bit of the first 32 bytes is clear: -4..3, as a code + 8.
    pair_crumbs<0, 0>(block + 32, block, codes);
    pair_crumbs<2, 1>(block + 32, block, codes + 16);
    pair_crumbs<4, 2>(block + 32, block, codes + 32);
    pair_crumbs<6, 3>(block + 32, block, codes + 48);
    pair_crumbs<0, 4>(block + 64, block, codes + 64);
    pair_crumbs<2, 5>(block + 64, block, codes + 80);
    pair_crumbs<4, 6>(block + 64, block, codes + 96);
    pair_crumbs<6, 7>(block + 64, block, codes + 112);
    const uint8_t *low = block + 96, *high = block + 104;
    const float d = widen(word(block + 108));
    float scale[16];
    for (int j = 0; j < 16; j++) {
      const int nibble = low[j & 7] >> 4 * (j >> 3) & 15, rest = high[j & 3] >> 2 * (j >> 2) & 3;
      scale[j] = d * (float)((nibble | rest << 4) - 32);
    }
    return put<16>(scale, scales);
  }
};

struct IQ4_NL {
  static constexpr int BYTES = 18, CODES = 16, SCALES = 1;
  static constexpr bool MINS = false;
  static int unpack(const uint8_t *block, uint8_t *codes, uint16_t *scales, uint16_t *) {
    pair_nibbles<16>(block + 2, codes);
    return put_half(block, scales);
  }
};

struct IQ4_XS {
  static constexpr int BYTES = 136, CODES = 128, SCALES = 8;
  static constexpr bool MINS = false;
  template <typename S>
  static int unpack(const uint8_t *block, uint8_t *codes, S *scales, S *) {
    for (int chunk = 0; chunk < 128; chunk += 16) pair_nibbles<16>(block + 8 + chunk, codes + chunk);
    const float d = widen(word(block));
    const int high = word(block + 2);
    float scale[8];
    for (int j = 0; j < 8; j++) {
      const int nibble = block[4 + j / 2] >> 4 * (j & 1) & 15;
      scale[j] = d * (float)((nibble | (high >> 2 * j & 3) << 4) - 32);
    }
    return put<8>(scale, scales);
  }
};

struct MXFP4 {
  static constexpr int BYTES = 17, CODES = 16, SCALES = 1;
  static constexpr bool MINS = false;
  static int unpack(const uint8_t *block, uint8_t *codes, uint16_t *scales, uint16_t *) {
    pair_nibbles<16>(block + 1, codes);
    const int exponent = block[0];  // 2^(exponent - 127) as bf16, the least of which is subnormal
    *scales = (uint16_t)(exponent == 0 ? 0x40 : exponent << 7);
    return exponent == 255;
  }
};

template <typename Layout, typename S>
int64_t unpack_all(const uint8_t *blocks, int64_t n, uint8_t *codes, void *scales, void *mins) {
  S *scale = (S *)scales, *min = (S *)mins;
  int64_t bad = 0;
  for (int64_t i = 0; i < n; i++) {
    bad += Layout::unpack(blocks, codes, scale, min);
    blocks += Layout::BYTES;
    codes += Layout::CODES;
    scale += Layout::SCALES;
    if (Layout::MINS) min += Layout::SCALES;
  }
  return bad;
}

template <typename Layout>
int64_t unpack_products(const uint8_t *blocks, int64_t n, uint8_t *codes, void *scales, void *mins,
                        int32_t exact) {
  return exact ? unpack_all<Layout, float>(blocks, n, codes, scales, mins)
               : unpack_all<Layout, uint16_t>(blocks, n, codes, scales, mins);
}

}  // namespace
}  // namespace llmr

int64_t llmr_unpack_gguf(int32_t type, const uint8_t *blocks, int64_t n_blocks, uint8_t *codes, void *scales,
                         void *mins, int32_t exact) {
  using namespace llmr;
  switch (type) {
    case LLMR_GGUF_Q4_0: return unpack_all<Q4_0, uint16_t>(blocks, n_blocks, codes, scales, mins);
    case LLMR_GGUF_Q4_1: return unpack_all<Q4_1, uint16_t>(blocks, n_blocks, codes, scales, mins);
    case LLMR_GGUF_Q5_0: return unpack_all<Q5_0, uint16_t>(blocks, n_blocks, codes, scales, mins);
    case LLMR_GGUF_Q5_1: return unpack_all<Q5_1, uint16_t>(blocks, n_blocks, codes, scales, mins);
    case LLMR_GGUF_Q8_0: return unpack_all<Q8_0, uint16_t>(blocks, n_blocks, codes, scales, mins);
    case LLMR_GGUF_Q4_K: return unpack_products<Q4_K>(blocks, n_blocks, codes, scales, mins, exact);
    case LLMR_GGUF_Q5_K: return unpack_products<Q5_K>(blocks, n_blocks, codes, scales, mins, exact);
    case LLMR_GGUF_Q6_K: return unpack_products<Q6_K>(blocks, n_blocks, codes, scales, mins, exact);
    case LLMR_GGUF_Q2_K: return unpack_products<Q2_K>(blocks, n_blocks, codes, scales, mins, exact);
    case LLMR_GGUF_Q3_K: return unpack_products<Q3_K>(blocks, n_blocks, codes, scales, mins, exact);
    case LLMR_GGUF_IQ4_NL: return unpack_all<IQ4_NL, uint16_t>(blocks, n_blocks, codes, scales, mins);
    case LLMR_GGUF_IQ4_XS: return unpack_products<IQ4_XS>(blocks, n_blocks, codes, scales, mins, exact);
    case LLMR_GGUF_MXFP4: return unpack_all<MXFP4, uint16_t>(blocks, n_blocks, codes, scales, mins);
    default: return -1;
  }
}

int64_t llmr_skip_strings(const uint8_t *strings, int64_t n_bytes, int64_t count, uint64_t most) {
  int64_t at = 0;
  for (int64_t i = 0; i < count; i++) {
    uint64_t length;
    if (n_bytes - at < 8) return -1;
    memcpy(&length, strings + at, 8);
    at += 8;
    if (length > most || length > static_cast<uint64_t>(n_bytes - at)) return -1;
    at += static_cast<int64_t>(length);
  }
  return at;
}

int64_t llmr_join_strings(const uint8_t *strings, int64_t n_bytes, int64_t count, uint8_t *out) {
  int64_t at = 0, written = 0;
  for (int64_t i = 0; i < count; i++) {
    uint64_t length;
    if (n_bytes - at < 8) return -1;
    memcpy(&length, strings + at, 8);
    at += 8;
    if (length > static_cast<uint64_t>(n_bytes - at) || memchr(strings + at, 0, length) != nullptr) return -1;
    if (out != nullptr) {
      memcpy(out + written, strings + at, length);
      out[written + static_cast<int64_t>(length)] = 0;
    }
    at += static_cast<int64_t>(length), written += static_cast<int64_t>(length) + 1;
  }
  return written;
}
