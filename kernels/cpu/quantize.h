// Quantizers that need no torch: plain functions that keep no state.
#pragma once
#include <stdint.h>

#include "abi.h"

// Symmetric 8-bit codes (q + 128) [n_groups, group] of weights of `type` (llmr_type), and a scale of the same
// type for each group: s = absmax / 127, rounded to that type; 1 if that is zero; q = w / s to nearest even.
// All in fp32 with true division, so the bits are those of quant/int8.py with torch. `group` is at most 128.
// Returns the index of the first weight that is not finite, where it stops; -1: all are.
LLMR_API int64_t llmr_quantize_int8(int32_t type, const void *weights, int64_t n_groups, int32_t group,
                                    uint8_t *codes, void *scales);
