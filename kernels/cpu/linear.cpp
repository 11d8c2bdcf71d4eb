#include "linear.h"

#include <string.h>

#include "matmul.h"
#include "refine.h"

namespace llmr {
namespace {

// A worker's scratch: its own activations, two tiles of products, and what matmul uses.
constexpr size_t OWN_BYTES = 1 << 20;
constexpr size_t TILE_BYTES = TILE_FLOATS * sizeof(float);
static_assert(OWN_BYTES + 2 * TILE_BYTES + MATMUL_SCRATCH <= SCRATCH);

// Activations of a token block should stay in a core's second-level cache beside the weights.
constexpr int64_t TOKEN_BLOCK_BYTES = 1280 << 10;
constexpr int64_t PANEL_BLOCK_BYTES = 192 << 10;
constexpr int MAX_PANEL_BLOCK = 32;
static_assert(MAX_PANEL_BLOCK * ROWS * MAX_TOKEN_BLOCK <= TILE_FLOATS);
constexpr int LINE = 16;  // tokens whose scales share a cache line

constexpr size_t SLACK = 64;  // kernels for 16 tokens may read scales behind the last one's
static_assert(GATHER_TOKENS % LINE == 0);

size_t aligned(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }

bool is_float(const llmr_weight &w) { return w.kind == LLMR_DENSE || w.kind == LLMR_LUT4; }

int acts_kind(const llmr_weight &w) { return w.kind == LLMR_W8 ? LLMR_W8 : LLMR_W4; }

int acts_group(const llmr_weight &w) {
  if (w.kind != LLMR_W8) return W4_GROUP;
  return w.group < W8_GROUP ? w.group : W8_GROUP;
}

// Lays the arrays of an Acts out in memory; returns the bytes, also without memory.
size_t place_codes(const Kernels &kernels, uint8_t *memory, Acts &acts) {
  const int groups = acts.k_padded / acts.group;
  const size_t codes = aligned(kernels.codes_bytes(acts.kind, acts.tokens, acts.k_padded));
  const size_t init = aligned(kernels.init_bytes(acts.kind, acts.tokens, acts.k_padded, acts.group));
  const size_t scale = aligned(sizeof(float) * groups * acts.tokens);
  acts.codes = memory;
  acts.init = reinterpret_cast<int32_t *>(memory + codes);
  acts.scale = reinterpret_cast<float *>(memory + codes + init);
  acts.sum = reinterpret_cast<float *>(memory + codes + init + scale);
  return codes + init + 2 * scale + SLACK;
}

// The same with what refines it.
size_t place(const Kernels &kernels, int tokens, uint8_t *memory, Acts &acts, Acts &fine) {
  const size_t bytes = place_codes(kernels, memory, acts);
  const int groups = acts.k_padded / acts.group;
  if (acts.kind != LLMR_W4 || groups > MOST_GROUPS) return bytes;
  fine = acts;
  fine.fine = nullptr;
  fine.gathered = nullptr;
  const size_t fine_bytes = place_codes(kernels, memory + bytes, fine);
  acts.fine = &fine;
  acts.words = (groups + 63) / 64;
  acts.refined = reinterpret_cast<uint64_t *>(memory + bytes + fine_bytes);
  size_t total = bytes + fine_bytes + aligned(sizeof(uint64_t) * acts.words * acts.tokens);
  if (kernels.gather != nullptr && tokens > FEW_TOKENS) {
    acts.gathered = memory + total;
    total += aligned(kernels.gathered_bytes(tokens, acts.k_padded));
  }
  return total;
}

// Lets the instruction set put the refined groups of many tokens together; false if it does not.
bool gather(Worker &worker, Inputs &inputs) {
  if (worker.kernels->gather == nullptr) return false;
  // All weights of 4 bits share one Acts, so there is one at most.
  const Acts *acts = nullptr;
  for (int j = 0; j < inputs.n_acts; j++)
    if (inputs.acts[j].gathered != nullptr) acts = &inputs.acts[j];
  if (acts == nullptr) return false;
  for (int t0 = worker.take() * GATHER_TOKENS; t0 < inputs.tokens; t0 = worker.take() * GATHER_TOKENS)
    worker.kernels->gather(acts, t0, t0 + GATHER_TOKENS < inputs.tokens ? t0 + GATHER_TOKENS : inputs.tokens);
  return true;
}

int distinct_acts(const Piece *pieces, int n_pieces, int tokens, Acts *acts) {
  int n = 0;
  for (int i = 0; i < n_pieces; i++) {
    const llmr_weight &w = *pieces[i].weight;
    if (is_float(w)) continue;
    bool known = false;
    for (int j = 0; j < n; j++) known |= acts[j].kind == acts_kind(w) && acts[j].group == acts_group(w);
    if (known) continue;
    acts[n] = {};
    acts[n].tokens = stride_of(tokens);
    acts[n].k = w.k;
    acts[n].k_padded = w.k_padded;
    acts[n].group = acts_group(w);
    acts[n].kind = acts_kind(w);
    n++;
  }
  return n;
}

// `row` gets what is multiplied, if that is not the row of x itself; `other` is used on the way there.
void prepare_row(const Worker &worker, const Source &source, const int32_t *order, int t, float *row, float *other,
                 float *residual, Inputs &inputs) {
  const float *x = source.x + (source.rows ? source.rows[t] : t) * source.ldx;
  if (source.norm.kind != LLMR_NO_NORM) {
    float *normed = order != nullptr ? other : row;
    worker.kernels->normalize(x, source.norm, source.k, normed);
    x = normed;
  }
  if (order != nullptr) {
    for (int i = 0; i < source.k; i++) row[i] = x[order[i]];
    x = row;
  }
  for (int j = 0; j < inputs.n_acts; j++) {
    Acts &acts = inputs.acts[j];
    worker.kernels->quantize(x, source.ldx, t, t + 1, &acts);
    if (acts.fine != nullptr && !worker.kernels->refines) refine(*worker.kernels, x, t, acts, residual);
  }
}

}  // namespace

int stride_of(int tokens) { return tokens <= FEW_TOKENS ? tokens : ((tokens + LINE - 1) / LINE | 1) * LINE; }

Inputs prepare(Worker &worker, const Source &source, int tokens, const Piece *pieces, int n_pieces,
               size_t spare) {
  Inputs inputs{};
  inputs.tokens = tokens;
  inputs.k = source.k;
  inputs.n_acts = distinct_acts(pieces, n_pieces, tokens, inputs.acts);
  bool keeps_rows = false;  // fp32 rows are needed after the norm
  for (int i = 0; i < n_pieces; i++) keeps_rows |= is_float(*pieces[i].weight);
  const bool is_normed = source.norm.kind != LLMR_NO_NORM;
  const int32_t *order = pieces[0].weight->order;
  const bool own_rows = is_normed || source.rows != nullptr || order != nullptr;
  const int64_t row = (source.k + 15) & ~15;
  const int64_t kept = keeps_rows && own_rows ? tokens : 1;

  size_t bytes = aligned(sizeof(float) * row * (kept + 1));
  for (int j = 0; j < inputs.n_acts; j++) bytes += place(*worker.kernels, tokens, nullptr, inputs.acts[j], inputs.fine[j]);
  const bool alone = tokens <= FEW_TOKENS && bytes <= OWN_BYTES;
  uint8_t *memory = alone ? worker.scratch : worker.common(aligned(spare) + bytes) + aligned(spare);
  float *rows = reinterpret_cast<float *>(memory);
  memory += aligned(sizeof(float) * row * (kept + 1));
  for (int j = 0; j < inputs.n_acts; j++) memory += place(*worker.kernels, tokens, memory, inputs.acts[j], inputs.fine[j]);
  inputs.x = keeps_rows && own_rows ? rows : source.x;
  inputs.ldx = keeps_rows && own_rows ? row : source.ldx;

  const auto fill = [&](int t) {
    // Rows that nobody keeps go through the worker's own scratch, one at a time.
    float *target = keeps_rows && own_rows ? rows + t * row : reinterpret_cast<float *>(worker.scratch);
    if (alone && !(keeps_rows && own_rows)) target = rows;
    float *other = alone ? rows + kept * row : reinterpret_cast<float *>(worker.scratch) + row;
    prepare_row(worker, source, order, t, target, other, tile_memory(worker), inputs);
    if (keeps_rows && !is_normed && order == nullptr && source.rows != nullptr)
      memcpy(target, source.x + source.rows[t] * source.ldx, sizeof(float) * source.k);
  };
  if (alone) {
    for (int t = 0; t < tokens; t++) fill(t);
  } else if (inputs.n_acts > 0 || (keeps_rows && own_rows)) {
    for (int b = worker.take(); b * LINE < tokens; b = worker.take())
      for (int t = b * LINE; t < tokens && t < (b + 1) * LINE; t++) fill(t);
    worker.barrier();
    if (gather(worker, inputs)) worker.barrier();
  }
  return inputs;
}

void product(Worker &worker, const llmr_weight *w, int p0, int p1, const Inputs &inputs, int t0, int t1,
             float *out, int64_t ldo) {
  void *scratch = matmul_scratch(worker);
  if (is_float(*w)) {
    worker.kernels->matmul_float(w, p0, p1, inputs.x, inputs.ldx, t0, t1, out, ldo, scratch);
    return;
  }
  int i = 0;
  while (inputs.acts[i].kind != acts_kind(*w) || inputs.acts[i].group != acts_group(*w)) i++;
  Acts acts = inputs.acts[i], fine = inputs.fine[i];
  if (acts.fine != nullptr) acts.fine = &fine;  // Inputs may have been copied since
  worker.kernels->matmul(w, p0, p1, &acts, t0, t1, out, ldo, scratch);
}

void gate_up_chunk(Worker &worker, const Piece &gate, const Piece &up, const Inputs &inputs, const Chunk &c,
                   int activation, float *a, int64_t lda) {
  const Kernels &kernels = *worker.kernels;
  const int first = c.p0 * ROWS, last = c.p1 * ROWS < up.weight->n ? c.p1 * ROWS : up.weight->n;
  const int64_t ldo = static_cast<int64_t>(c.p1 - c.p0) * ROWS;
  float *opened = tile_memory(worker), *raised = opened + TILE_FLOATS;
  if (gate.weight != nullptr) product(worker, gate.weight, c.p0, c.p1, inputs, c.t0, c.t1, opened, ldo);
  product(worker, up.weight, c.p0, c.p1, inputs, c.t0, c.t1, raised, ldo);
  for (int t = c.t0; t < c.t1; t++, opened += ldo, raised += ldo) {
    if (gate.bias != nullptr) kernels.finish(opened, gate.bias + first, opened, last - first);
    if (up.bias != nullptr) kernels.finish(raised, up.bias + first, raised, last - first);
    kernels.gate_up(gate.weight != nullptr ? opened : nullptr, raised, a + t * lda + first, last - first, activation);
  }
}

int64_t panel_bytes(const llmr_weight &w) {
  const int64_t columns = static_cast<int64_t>(w.k_padded) * ROWS;
  if (w.kind == LLMR_DENSE) return columns * (w.type == LLMR_F32 ? 4 : 2);
  return w.kind == LLMR_W8 ? columns : columns / 2;
}

Chunks::Chunks(const Worker &worker, int panels, int tokens, int64_t bytes_per_panel, int k)
    : panels_(panels), tokens_(tokens) {
  int64_t block = PANEL_BLOCK_BYTES / (bytes_per_panel > 0 ? bytes_per_panel : 1);
  // Several chunks for each worker, so that one that lost its core for a while does not hold up all.
  const int fair = panels / (worker.n * (tokens <= FEW_TOKENS ? 6 : 8));
  if (block > fair) block = fair;
  if (block > MAX_PANEL_BLOCK) block = MAX_PANEL_BLOCK;
  panel_block_ = block < 1 ? 1 : static_cast<int>(block);
  n_panel_blocks_ = (panels + panel_block_ - 1) / panel_block_;

  int64_t fit = TOKEN_BLOCK_BYTES / k / GATHER_TOKENS;
  if (fit > MAX_TOKEN_BLOCK / GATHER_TOKENS) fit = MAX_TOKEN_BLOCK / GATHER_TOKENS;
  token_block_ = static_cast<int>(fit < 1 ? 1 : fit) * GATHER_TOKENS;
  n_token_blocks_ = (tokens + token_block_ - 1) / token_block_;
}

Chunk Chunks::chunk(int i) const {
  const int pb = i % n_panel_blocks_, tb = i / n_panel_blocks_;
  const int p0 = pb * panel_block_, t0 = tb * token_block_;
  const int p1 = p0 + panel_block_ < panels_ ? p0 + panel_block_ : panels_;
  const int t1 = t0 + token_block_ < tokens_ ? t0 + token_block_ : tokens_;
  return {p0, p1, t0, t1};
}

float *tile_memory(Worker &worker) { return reinterpret_cast<float *>(worker.scratch + OWN_BYTES); }

void *matmul_scratch(Worker &worker) { return worker.scratch + OWN_BYTES + 2 * TILE_BYTES; }

}  // namespace llmr
