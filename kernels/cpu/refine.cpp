#include "refine.h"

#include <math.h>
#include <string.h>

namespace llmr {
namespace {

void residual_of(const float *x, int n, float *residual) {
  float most = 0;
  for (int i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
  const float factor = 127.f / most, scale = most / 127.f;
  for (int i = 0; i < n; i++) residual[i] = x[i] - nearbyintf(x[i] * factor) * scale;
}

}  // namespace

void refine(const Kernels &kernels, const float *x, int t, Acts &acts, float *residual) {
  const int groups = acts.k_padded / acts.group;
  uint64_t *refined = acts.refined + static_cast<int64_t>(t) * acts.words;
  memset(refined, 0, sizeof(uint64_t) * acts.words);
  const float *scale = acts.scale + t;
  RefineLimit row;
  for (int g = 0; g < groups; g++) row.see(scale[static_cast<int64_t>(g) * acts.tokens]);
  const int64_t limit = row.value();
  bool any = false;
  for (int g = 0; g < groups; g++) {
    if (!RefineLimit::exceeded(scale[static_cast<int64_t>(g) * acts.tokens], limit)) continue;
    if (!any) memset(residual, 0, sizeof(float) * acts.k_padded);
    any = true;
    refined[g / 64] |= uint64_t{1} << g % 64;
    const int first = g * acts.group;
    residual_of(x + first, acts.k - first < acts.group ? acts.k - first : acts.group, residual + first);
  }
  if (any) {
    kernels.quantize(residual, acts.k_padded, t, t + 1, acts.fine);
    return;
  }
  for (int g = 0; g < groups; g++) {
    acts.fine->scale[static_cast<int64_t>(g) * acts.tokens + t] = 0;
    acts.fine->sum[static_cast<int64_t>(g) * acts.tokens + t] = 0;
  }
}

}  // namespace llmr
