// op_embed: rows of the embedding table, dequantized as kernels/reference/weights.py defines it.
#include "float.h"
#include "kernels.h"

namespace llmr {
namespace {

// The unsigned codes of columns k .. k + 8 of a row; fewer where the row ends.
void codes_of_eight(const llmr_weight &w, int64_t panel, int r, int k, uint8_t *codes) {
  if (w.kind == LLMR_W8) {
    for (int c = 0; c < 8 && k + c < w.k; c++) {
      const int64_t quad = panel * (w.k_padded / 4) + (k + c) / 4;
      codes[c] = w.codes[(quad * ROWS + r) * 4 + c % 4];
    }
    return;
  }
  const uint8_t *bytes = w.codes + ((panel * (w.k_padded / 8) + k / 8) * ROWS + r) * 4;
  for (int c = 0; c < 8; c++) codes[c] = c < 4 ? bytes[c] & 15 : bytes[c - 4] >> 4;
}

// Row `id` of a quantized weight times `factor`. `scratch` takes its scales and minima. Each value
// is rounded after its product and after its sum, as the definition rounds it.
void gather_quantized(const llmr_weight &w, int id, float factor, float *scratch, float *out) {
  const int64_t panel = id / ROWS;
  const int r = id % ROWS, groups = w.k_padded / w.group;
  const int64_t element = (panel * groups * ROWS + r) * (w.type == LLMR_F32 ? 4 : 2);
  float *scales = scratch, *mins = scratch + groups;
  base::widen(static_cast<const uint8_t *>(w.scales) + element, ROWS, groups, w.type, scales);
  if (w.mins != nullptr && w.min_type == LLMR_U8)
    for (int g = 0; g < groups; g++)
      mins[g] = -(scales[g] * static_cast<const uint8_t *>(w.mins)[(panel * groups + g) * ROWS + r]);
  else if (w.mins != nullptr)
    base::widen(static_cast<const uint8_t *>(w.mins) + element, ROWS, groups, w.type, mins);
  const int middle = w.mins != nullptr ? 0 : w.kind == LLMR_W8 ? 128 : 8;
  for (int k = 0; k < w.k; k += 8) {  // a group ends with one of the eights
    uint8_t codes[8] = {};
    codes_of_eight(w, panel, r, k, codes);
    const int group = k / w.group;
    for (int c = 0; c < 8 && k + c < w.k; c++) {
      const float code = w.table != nullptr ? w.table[codes[c]] : static_cast<float>(codes[c] - middle);
      float value = code * scales[group];
      if (w.mins != nullptr) value += mins[group];
      out[k + c] = value * factor;
    }
  }
}

void gather_dense(const llmr_weight &w, int id, float factor, float *out) {
  const int64_t first = static_cast<int64_t>(id / ROWS) * w.k_padded * ROWS + id % ROWS;
  base::widen(w.codes + first * (w.type == LLMR_F32 ? 4 : 2), ROWS, w.k, w.type, out);
  if (factor != 1.0f)
    for (int k = 0; k < w.k; k++) out[k] *= factor;
}

}  // namespace

void op_embed(Worker &worker, const llmr_instr &in, const llmr_step &step) {
  const llmr_weight &table = *static_cast<const llmr_weight *>(in.p[0]);
  float *h = static_cast<float *>(in.p[1]);
  const int width = in.i[0];
  for (int t = worker.take(); t < step.n_tokens; t = worker.take()) {
    float *row = h + static_cast<int64_t>(t) * width;
    if (table.kind == LLMR_DENSE)
      gather_dense(table, step.token_ids[t], in.f[0], row);
    else
      gather_quantized(table, step.token_ids[t], in.f[0], reinterpret_cast<float *>(worker.scratch), row);
  }
}

}  // namespace llmr
