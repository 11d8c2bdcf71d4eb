#define LLMR_ISA avx2
#define LLMR_VECTOR_BYTES 32
#include "quantize_panels.h"
