#define LLMR_ISA avx512
#define LLMR_VECTOR_BYTES 64
#include "quantize_panels.h"
