// Storage forms (kernels/forms.py) into panels of 16 rows.
#pragma once
#include "abi.h"

namespace llmr {

// Row-major arrays of a storage form. codes as in kernels/forms.py: for Dense the weight itself.
struct RowMajor {
  const uint8_t *codes;
  const void *scales;
  const void *mins;
};

// Packs panels p0..p1 of `weight`, whose arrays are allocated and whose fields are set.
void pack_panels(const llmr_weight &weight, const RowMajor &from, int p0, int p1);

}  // namespace llmr
