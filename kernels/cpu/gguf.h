// What GGUF files hold in bulk: blocks, to storage forms (kernels/forms.py), and strings. Plain functions
// that keep no state.
#pragma once
#include <stdint.h>

#include "abi.h"

// Types by the number GGUF gives them.
enum llmr_gguf_type : int32_t {
  LLMR_GGUF_Q4_0 = 2,
  LLMR_GGUF_Q4_1 = 3,
  LLMR_GGUF_Q5_0 = 6,
  LLMR_GGUF_Q5_1 = 7,
  LLMR_GGUF_Q8_0 = 8,
  LLMR_GGUF_Q2_K = 10,
  LLMR_GGUF_Q3_K = 11,
  LLMR_GGUF_Q4_K = 12,
  LLMR_GGUF_Q5_K = 13,
  LLMR_GGUF_Q6_K = 14,
  LLMR_GGUF_IQ4_NL = 20,
  LLMR_GGUF_IQ4_XS = 23,
  LLMR_GGUF_MXFP4 = 39,
};

// Unpacks n_blocks consecutive blocks. A row is a whole number of blocks, so they may be any rows of a
// weight, or any part of one row.
//   codes   Q5_*, Q6_K, Q8_0: one per byte. Others: two per byte, the even column in the low nibble.
//   scales  one f16 (MXFP4: bf16) per 32 weights; Q2_K, Q3_K and Q6_K: per 16.
//   mins    like scales; of Q4_1, Q5_1, Q2_K, Q4_K and Q5_K only, otherwise not touched.
// The weight is scale * code + min; without minima scale * (code - 8), or (code - 128) for bytes. Codes of
// IQ4_* and MXFP4 are places in a table, which the caller has: scale * table[code].
// A scale or minimum of Q*_K and IQ4_XS is a product in the file, exact in fp32: `exact` keeps it in fp32,
// otherwise it is rounded once, to nearest even. Those of other types are 16 bits in the file, or the power
// of two whose exponent it has (MXFP4: 2^(e - 127); e = 255 is counted as not finite).
// Returns the number of scales and minima that are not finite: 0 if all is well. -1: unknown type.
LLMR_API int64_t llmr_unpack_gguf(int32_t type, const uint8_t *blocks, int64_t n_blocks, uint8_t *codes,
                                  void *scales, void *mins, int32_t exact);

// An array of `count` strings, each a u64 of its length and its bytes. skip: the bytes it takes; -1 if that
// is more than n_bytes or a string is longer than `most`. join: all of them in `out` one after another with a
// zero byte behind each; returns the bytes of that, and only counts them if `out` is null; -1 if a string
// holds a zero byte or goes beyond n_bytes.
LLMR_API int64_t llmr_skip_strings(const uint8_t *strings, int64_t n_bytes, int64_t count, uint64_t most);
LLMR_API int64_t llmr_join_strings(const uint8_t *strings, int64_t n_bytes, int64_t count, uint8_t *out);
