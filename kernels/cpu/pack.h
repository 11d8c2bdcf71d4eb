// Weights into panels of 16 rows, from storage forms (kernels/forms.py) or GGUF's blocks.
#pragma once
#include "abi.h"

// Packs n weights, whose arrays are allocated and whose fields are set, with `threads` threads that
// end with the call: a weight is too little work to wait for each other after it. Returns 0 if all is
// well, -1 without memory, and i > 0 if the blocks of weights[i - 1] hold scales or minima that are
// not finite (the first such weight).
LLMR_API int32_t llmr_pack(const llmr_weight *const *weights, const llmr_source *sources, int32_t n,
                           int32_t threads);
