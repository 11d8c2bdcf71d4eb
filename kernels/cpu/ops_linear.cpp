// The ops around a matrix product: query/key/value, output and down projections, gate/up, head.
#include "linear.h"

namespace llmr {
namespace {

const llmr_weight *weight_at(const llmr_instr &in, int i) { return static_cast<const llmr_weight *>(in.p[i]); }
float *floats_at(const llmr_instr &in, int i) { return static_cast<float *>(in.p[i]); }

// Calls use(piece, first row, rows, t, values) for each token's row of products of a chunk.
template <class Use>
void each_row(const Piece &piece, const Chunk &c, const float *tile, int64_t ldo, Use use) {
  const int first = c.p0 * ROWS, last = c.p1 * ROWS;
  const int rows = (last < piece.weight->n ? last : piece.weight->n) - first;
  for (int t = c.t0; t < c.t1; t++) use(first, rows, t, tile + (t - c.t0) * ldo);
}

// Multiplies all pieces; the chunks of one piece follow those of the one before. `use` gets the products;
// those of a piece without bias and padding are written to `direct` at once, rows ldd apart, if given.
template <class Use>
void multiply(Worker &worker, const Inputs &inputs, const Piece *pieces, int n_pieces, float *direct, int64_t ldd,
              Use use) {
  float *const tile = tile_memory(worker);
  int done = 0, i = worker.take();
  for (int j = 0; j < n_pieces; j++) {
    const llmr_weight &w = *pieces[j].weight;
    const Chunks chunks(worker, w.panels, inputs.tokens, panel_bytes(w), w.k);
    for (; i < done + chunks.count(); i = worker.take()) {
      const Chunk c = chunks.chunk(i - done);
      if (direct != nullptr && pieces[j].bias == nullptr && w.n % ROWS == 0) {
        product(worker, &w, c.p0, c.p1, inputs, c.t0, c.t1, direct + c.t0 * ldd + pieces[j].column + c.p0 * ROWS, ldd);
        continue;
      }
      const int64_t ldo = static_cast<int64_t>(c.p1 - c.p0) * ROWS;
      product(worker, &w, c.p0, c.p1, inputs, c.t0, c.t1, tile, ldo);
      each_row(pieces[j], c, tile, ldo, [&](int first, int rows, int t, const float *values) {
        use(pieces[j], first, rows, t, values);
      });
    }
    done += chunks.count();
  }
}

}  // namespace

void op_norm_linear(Worker &worker, const llmr_instr &in, const llmr_step &step) {
  const int n = in.i[0], width = in.i[1], ldy = in.i[2];
  float *y = floats_at(in, 2);
  Piece pieces[3];
  for (int j = 0, column = 0; j < n; j++) {
    pieces[j] = {weight_at(in, 3 + j), floats_at(in, 6 + j), column};
    column += pieces[j].weight->n;
  }
  const Source source = {floats_at(in, 0), width, nullptr, floats_at(in, 1), in.f[0], in.f[1], width};
  const Inputs inputs = prepare(worker, source, step.n_tokens, pieces, n);
  multiply(worker, inputs, pieces, n, y, ldy, [&](const Piece &piece, int first, int rows, int t, const float *values) {
    float *out = y + static_cast<int64_t>(t) * ldy + piece.column + first;
    worker.kernels->finish(values, piece.bias ? piece.bias + first : nullptr, out, rows, false);
  });
}

void op_linear_add(Worker &worker, const llmr_instr &in, const llmr_step &step) {
  const int k = in.i[0], n = in.i[1];
  const Piece piece = {weight_at(in, 1), floats_at(in, 2), 0};
  const float *gamma = floats_at(in, 3);
  float *h = floats_at(in, 4);
  const Source source = {floats_at(in, 0), k, nullptr, nullptr, 0.f, 0.f, k};
  const size_t spare = gamma == nullptr ? 0 : sizeof(float) * n * step.n_tokens;
  const Inputs inputs = prepare(worker, source, step.n_tokens, &piece, 1, spare);
  if (gamma == nullptr) {
    multiply(worker, inputs, &piece, 1, nullptr, 0, [&](const Piece &, int first, int rows, int t, const float *values) {
      float *out = h + static_cast<int64_t>(t) * n + first;
      worker.kernels->finish(values, piece.bias ? piece.bias + first : nullptr, out, rows, true);
    });
    return;
  }
  // The norm needs whole rows: products go to common memory first, in the part that preparing spared.
  float *whole = reinterpret_cast<float *>(worker.common(spare));
  multiply(worker, inputs, &piece, 1, whole, n, [&](const Piece &, int first, int rows, int t, const float *values) {
    float *out = whole + static_cast<int64_t>(t) * n + first;
    worker.kernels->finish(values, piece.bias ? piece.bias + first : nullptr, out, rows, false);
  });
  worker.barrier();
  for (int t = worker.take(); t < step.n_tokens; t = worker.take()) {
    float *row = whole + static_cast<int64_t>(t) * n;
    worker.kernels->rms_norm(row, gamma, in.f[0], in.f[1], n, row);
    float *out = h + static_cast<int64_t>(t) * n;
    for (int r = 0; r < n; r++) out[r] += row[r];
  }
}

void op_norm_gate_up(Worker &worker, const llmr_instr &in, const llmr_step &step) {
  const int width = in.i[0], inner = in.i[1], activation = in.i[2];
  const Piece pieces[2] = {{weight_at(in, 2), floats_at(in, 3), 0}, {weight_at(in, 4), floats_at(in, 5), 0}};
  float *a = floats_at(in, 6);
  const Source source = {floats_at(in, 0), width, nullptr, floats_at(in, 1), in.f[0], in.f[1], width};
  const Inputs inputs = prepare(worker, source, step.n_tokens, pieces, 2);

  const llmr_weight &gate = *pieces[0].weight, &up = *pieces[1].weight;
  const Chunks chunks(worker, gate.panels, inputs.tokens, panel_bytes(gate) + panel_bytes(up), width);
  float *opened = tile_memory(worker), *raised = opened + TILE_FLOATS;
  for (int i = worker.take(); i < chunks.count(); i = worker.take()) {
    const Chunk c = chunks.chunk(i);
    const int64_t ldo = static_cast<int64_t>(c.p1 - c.p0) * ROWS;
    product(worker, &gate, c.p0, c.p1, inputs, c.t0, c.t1, opened, ldo);
    product(worker, &up, c.p0, c.p1, inputs, c.t0, c.t1, raised, ldo);
    each_row(pieces[0], c, opened, ldo, [&](int first, int rows, int t, const float *values) {
      float *g = const_cast<float *>(values), *u = raised + (t - c.t0) * ldo;
      for (int r = 0; pieces[0].bias && r < rows; r++) g[r] += pieces[0].bias[first + r];
      for (int r = 0; pieces[1].bias && r < rows; r++) u[r] += pieces[1].bias[first + r];
      worker.kernels->gate_up(g, u, a + static_cast<int64_t>(t) * inner + first, rows, activation);
    });
  }
}

void op_norm_head(Worker &worker, const llmr_instr &in, const llmr_step &step) {
  const int width = in.i[0], vocab = in.i[1];
  const float scale = in.f[2];
  const Piece piece = {weight_at(in, 2), floats_at(in, 3), 0};
  float *logits = floats_at(in, 4);
  const Source source = {floats_at(in, 0), width, step.rows, floats_at(in, 1), in.f[0], in.f[1], width};
  const Inputs inputs = prepare(worker, source, step.n_rows, &piece, 1);
  multiply(worker, inputs, &piece, 1, scale == 1.f ? logits : nullptr, vocab,
           [&](const Piece &, int first, int rows, int t, const float *values) {
    float *out = logits + static_cast<int64_t>(t) * vocab + first;
    for (int r = 0; r < rows; r++) out[r] = (values[r] + (piece.bias ? piece.bias[first + r] : 0.f)) * scale;
  });
}

}  // namespace llmr
