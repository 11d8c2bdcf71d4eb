// op_moe_add: a mixture of experts. All workers go through the experts in order and share the panels
// of each, so that the sum over experts is the same for every number of workers.
#include <math.h>
#include <string.h>

#include "linear.h"

namespace llmr {
namespace {

constexpr int POINTERS = 6;  // of an expert: gate, its bias, up, its bias, down, its bias

struct Mixture {
  int tokens, width, inner, n_experts, top_k, activation;
  bool normalize;
  float scale;
  Piece router;
  void **experts;

  Piece piece(int expert, int which) const {
    void **p = experts + POINTERS * expert + 2 * which;
    return {static_cast<const llmr_weight *>(p[0]), static_cast<const float *>(p[1]), 0};
  }
};

// What the workers share, at the start of common memory.
struct State {
  float *x;         // [T, D] the normed rows: h changes while experts still read them
  float *scores;    // [T, n experts]
  float *opened;    // [T, F] activation(gate) * up of one expert's tokens
  float *shares;    // [T, top k] probabilities of the chosen experts, best first
  int32_t *chosen;  // [T, top k]
  int32_t *starts;  // [n experts + 1] where an expert's entries start in:
  int32_t *tokens;  // [T * top k]
  float *weights;   // [T * top k] shares times scale
};

template <class T>
void place(uint8_t *memory, size_t &used, T *&pointer, int64_t count) {
  if (memory != nullptr) pointer = reinterpret_cast<T *>(memory + used);
  used += (count * sizeof(T) + 63) & ~static_cast<size_t>(63);
}

// Lays the state out; returns its bytes, also without memory.
size_t lay_out(const Mixture &m, uint8_t *memory, State &s) {
  const int64_t tokens = m.tokens, entries = tokens * m.top_k;
  size_t used = 0;
  place(memory, used, s.x, tokens * m.width);
  place(memory, used, s.scores, tokens * m.n_experts);
  place(memory, used, s.opened, tokens * m.inner);
  place(memory, used, s.shares, entries);
  place(memory, used, s.chosen, entries);
  place(memory, used, s.starts, m.n_experts + 1);
  place(memory, used, s.tokens, entries);
  place(memory, used, s.weights, entries);
  return used;
}

// At least what prepare() takes of common memory for all tokens of k columns, whatever the weights.
// Common memory must not move while the state lies in it.
size_t most_prepared(const Kernels &kernels, int n_tokens, int k) {
  const int tokens = stride_of(n_tokens);
  constexpr int SMALLEST_GROUP = 16, W8_ACTS = 2;  // two weights of different groups may be prepared for
  const int padded = (k + 2 * W8_GROUP - 1) / W8_GROUP * W8_GROUP;
  const size_t sums = 2 * sizeof(float) * (padded / SMALLEST_GROUP) * tokens;
  size_t bytes = sizeof(float) * padded * tokens;
  for (int i = 0; i < 1 + W8_ACTS; i++) {
    const int kind = i == 0 ? LLMR_W4 : LLMR_W8;
    const int group = i == 0 ? W4_GROUP : SMALLEST_GROUP;
    const int refined = i == 0 ? 2 : 1;  // 4-bit weights: codes twice, and a bit for each group
    bytes += refined * (sums + kernels.codes_bytes(kind, tokens, padded));
    bytes += refined * kernels.init_bytes(kind, tokens, padded, group);
    bytes += tokens * (padded / W4_GROUP / 8 + sizeof(uint64_t));
    if (i == 0 && kernels.gather != nullptr) bytes += kernels.gathered_bytes(tokens, padded);
  }
  constexpr size_t ALIGNMENTS = 4096;
  return bytes + ALIGNMENTS;
}

// Calls use(first row, rows, t, values) for each token's row of products of a chunk.
template <class Use>
void each_row(const llmr_weight &w, const Chunk &c, const float *tile, Use use) {
  const int first = c.p0 * ROWS, last = c.p1 * ROWS < w.n ? c.p1 * ROWS : w.n;
  for (int t = c.t0; t < c.t1; t++)
    use(first, last - first, t, tile + static_cast<int64_t>(t - c.t0) * (c.p1 - c.p0) * ROWS);
}

template <class Use>
void multiply(Worker &worker, const Piece &piece, const Inputs &inputs, Use use) {
  const llmr_weight &w = *piece.weight;
  float *tile = tile_memory(worker);
  const Chunks chunks(worker, w.panels, inputs.tokens, panel_bytes(w), w.k);
  for (int i = worker.take(); i < chunks.count(); i = worker.take()) {
    const Chunk c = chunks.chunk(i);
    product(worker, &w, c.p0, c.p1, inputs, c.t0, c.t1, tile, static_cast<int64_t>(c.p1 - c.p0) * ROWS);
    each_row(w, c, tile, use);
  }
}

const float *bias_from(const Piece &piece, int row) { return piece.bias ? piece.bias + row : nullptr; }

// ---- the router -----------------------------------------------------------------------------------

// Softmax of one token's scores and its best experts; of equal ones the lowest number.
void choose(const Mixture &m, const float *scores, int32_t *chosen, float *shares) {
  int n = 0;
  for (int e = 0; e < m.n_experts; e++) {
    if (n == m.top_k && !(scores[e] > scores[chosen[n - 1]])) continue;
    int at = n < m.top_k ? n++ : n - 1;
    for (; at > 0 && scores[e] > scores[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
    chosen[at] = e;
  }
  const float largest = scores[chosen[0]];
  float sum = 0, kept = 0;
  for (int e = 0; e < m.n_experts; e++) sum += expf(scores[e] - largest);
  for (int i = 0; i < m.top_k; i++) {
    shares[i] = expf(scores[chosen[i]] - largest) / sum;
    kept += shares[i];
  }
  for (int i = 0; m.normalize && i < m.top_k; i++) shares[i] /= kept;
}

// Turns the choices of tokens into the tokens of experts, in ascending order.
void list_tokens(const Mixture &m, const State &s) {
  const int entries = m.tokens * m.top_k;
  memset(s.starts, 0, sizeof(int32_t) * (m.n_experts + 1));
  for (int i = 0; i < entries; i++) s.starts[s.chosen[i] + 1]++;
  for (int e = 0; e < m.n_experts; e++) s.starts[e + 1] += s.starts[e];
  for (int i = 0; i < entries; i++) {
    const int at = s.starts[s.chosen[i]]++;
    s.tokens[at] = i / m.top_k;
    s.weights[at] = s.shares[i] * m.scale;
  }
  // Each start has moved to the next one's place.
  memmove(s.starts + 1, s.starts, sizeof(int32_t) * m.n_experts);
  s.starts[0] = 0;
}

void route(Worker &worker, const Mixture &m, const State &s, size_t state_bytes) {
  const Source source = {s.x, m.width, nullptr, NO_NORM, m.width};
  const Inputs inputs = prepare(worker, source, m.tokens, &m.router, 1, state_bytes);
  multiply(worker, m.router, inputs, [&](int first, int rows, int t, const float *values) {
    float *out = s.scores + static_cast<int64_t>(t) * m.n_experts + first;
    worker.kernels->finish(values, bias_from(m.router, first), out, rows);
  });
  worker.barrier();
  for (int t = worker.take(); t < m.tokens; t = worker.take()) {
    const int64_t entry = static_cast<int64_t>(t) * m.top_k;
    choose(m, s.scores + static_cast<int64_t>(t) * m.n_experts, s.chosen + entry, s.shares + entry);
  }
  worker.barrier();
  if (worker.id == 0) list_tokens(m, s);
  worker.barrier();
}

// ---- one expert -----------------------------------------------------------------------------------

void open_expert(Worker &worker, const Mixture &m, const State &s, size_t state_bytes, int expert) {
  const Piece pieces[2] = {m.piece(expert, 0), m.piece(expert, 1)};
  const llmr_weight &gate = *pieces[0].weight, &up = *pieces[1].weight;
  const int32_t *tokens = s.tokens + s.starts[expert];
  const int count = s.starts[expert + 1] - s.starts[expert];
  const Source source = {s.x, m.width, tokens, NO_NORM, m.width};
  const Inputs inputs = prepare(worker, source, count, pieces, 2, state_bytes);
  const Chunks chunks(worker, gate.panels, count, panel_bytes(gate) + panel_bytes(up), m.width);
  for (int i = worker.take(); i < chunks.count(); i = worker.take())
    gate_up_chunk(worker, pieces[0], pieces[1], inputs, chunks.chunk(i), m.activation, s.opened, m.inner);
  worker.barrier();
}

void add_expert(Worker &worker, const Mixture &m, const State &s, size_t state_bytes, int expert, float *h) {
  const Piece down = m.piece(expert, 2);
  const int start = s.starts[expert], count = s.starts[expert + 1] - start;
  const Source source = {s.opened, m.inner, nullptr, NO_NORM, m.inner};
  const Inputs inputs = prepare(worker, source, count, &down, 1, state_bytes);
  multiply(worker, down, inputs, [&](int first, int rows, int t, const float *values) {
    float *out = h + static_cast<int64_t>(s.tokens[start + t]) * m.width + first;
    worker.kernels->add(values, bias_from(down, first), s.weights[start + t], out, rows);
  });
  worker.barrier();
}

}  // namespace

void op_moe_add(Worker &worker, const llmr_instr &in, const llmr_step &step) {
  float *h = static_cast<float *>(in.p[0]);
  const Norm norm = norm_of(in);
  const Piece router = {static_cast<const llmr_weight *>(in.p[3]), static_cast<const float *>(in.p[4]), 0};
  const Mixture m = {step.n_tokens, in.i[1],   in.i[2], in.i[3], in.i[4],
                     in.i[6],       in.i[5] != 0, in.f[2], router,  static_cast<void **>(in.p[5])};
  State s{};
  const size_t state_bytes = lay_out(m, nullptr, s);
  const size_t for_width = most_prepared(*worker.kernels, m.tokens, m.width);
  const size_t for_inner = most_prepared(*worker.kernels, m.tokens, m.inner);
  lay_out(m, worker.common(state_bytes + (for_width > for_inner ? for_width : for_inner)), s);

  for (int t = worker.take(); t < m.tokens; t = worker.take()) {
    const int64_t row = static_cast<int64_t>(t) * m.width;
    worker.kernels->normalize(h + row, norm, m.width, s.x + row);
  }
  worker.barrier();
  route(worker, m, s, state_bytes);
  for (int expert = 0; expert < m.n_experts; expert++) {
    if (s.starts[expert] == s.starts[expert + 1]) continue;
    open_expert(worker, m, s, state_bytes, expert);
    add_expert(worker, m, s, state_bytes, expert, h);
  }
}

}  // namespace llmr
