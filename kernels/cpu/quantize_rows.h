// llmr_quantize for rows row0..row1, by instruction set. `memory`: ROW_MEMORY floats at a 64-byte boundary.
#pragma once
#include "quantize.h"

namespace llmr {

constexpr int LANES = 16;           // rows that are quantized side by side: a panel
constexpr int PANELS = 4;           // panels that use a part of a block's factors while it is near
constexpr int WIDEST_GROUP = 128;
constexpr int WIDEST_BLOCK = 2048;
constexpr int64_t ROW_MEMORY = int64_t(PANELS) * LANES * (WIDEST_BLOCK + WIDEST_GROUP);

namespace base {
int64_t quantize_rows(const llmr_quantization &what, int64_t row0, int64_t row1, float *memory);
}
namespace avx2 {
int64_t quantize_rows(const llmr_quantization &what, int64_t row0, int64_t row1, float *memory);
}
namespace avx512 {
int64_t quantize_rows(const llmr_quantization &what, int64_t row0, int64_t row1, float *memory);
}

}  // namespace llmr
