// pick: one id from a row of logits, as kernels/reference/sampling.py defines it.
#pragma once
#include "kernels.h"

namespace llmr {

enum PickStatus : int32_t {
  PICK_CHOSEN = 0,
  PICK_NOT_FINITE = 1,  // one of the first `vocab` logits is not a finite number
  PICK_NO_MEMORY = 2,
  PICK_NOTHING_ALLOWED = 3,  // mask and bias leave no id to draw
};

// Chooses among logits[0 .. vocab) and returns result.status. The filters, the sum of probabilities
// behind top-p and the noise are computed in double. Ids outside the vocabulary in history, allowed
// and bias_ids count for nothing. If n_top exceeds vocab, the surplus of top_ids is -1.
int pick(const Kernels &kernels, const float *logits, const llmr_pick_request &request,
         llmr_pick_result &result);

}  // namespace llmr
