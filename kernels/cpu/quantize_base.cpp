#define LLMR_ISA base
#define LLMR_VECTOR_BYTES 16
#include "quantize_panels.h"
