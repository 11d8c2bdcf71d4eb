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
  const int n = in.i[1], width = in.i[2], ldy = in.i[3];
  float *y = floats_at(in, 3);
  Piece pieces[3];
  for (int j = 0, column = 0; j < n; j++) {
    pieces[j] = {weight_at(in, 4 + j), floats_at(in, 7 + j), column};
    column += pieces[j].weight->n;
  }
  const Source source = {floats_at(in, 0), width, nullptr, norm_of(in), width};
  const Inputs inputs = prepare(worker, source, step.n_tokens, pieces, n);
  multiply(worker, inputs, pieces, n, y, ldy, [&](const Piece &piece, int first, int rows, int t, const float *values) {
    float *out = y + static_cast<int64_t>(t) * ldy + piece.column + first;
    worker.kernels->finish(values, piece.bias ? piece.bias + first : nullptr, out, rows);
  });
}

void op_linear_add(Worker &worker, const llmr_instr &in, const llmr_step &step) {
  const int k = in.i[1], n = in.i[2];
  const float scale = in.f[2];
  const Piece piece = {weight_at(in, 3), floats_at(in, 4), 0};
  const Norm norm = norm_of(in);
  float *h = floats_at(in, 5);
  const Source source = {floats_at(in, 0), k, nullptr, NO_NORM, k};
  const bool is_normed = norm.kind != LLMR_NO_NORM;
  const size_t spare = is_normed ? sizeof(float) * n * step.n_tokens : 0;
  const Inputs inputs = prepare(worker, source, step.n_tokens, &piece, 1, spare);
  if (!is_normed) {
    multiply(worker, inputs, &piece, 1, nullptr, 0, [&](const Piece &, int first, int rows, int t, const float *values) {
      float *out = h + static_cast<int64_t>(t) * n + first;
      worker.kernels->add(values, piece.bias ? piece.bias + first : nullptr, scale, out, rows);
    });
    return;
  }
  // The norm needs whole rows: products go to common memory first, in the part that preparing spared.
  float *whole = reinterpret_cast<float *>(worker.common(spare));
  multiply(worker, inputs, &piece, 1, whole, n, [&](const Piece &, int first, int rows, int t, const float *values) {
    float *out = whole + static_cast<int64_t>(t) * n + first;
    worker.kernels->finish(values, piece.bias ? piece.bias + first : nullptr, out, rows);
  });
  worker.barrier();
  for (int t = worker.take(); t < step.n_tokens; t = worker.take()) {
    float *row = whole + static_cast<int64_t>(t) * n;
    worker.kernels->normalize(row, norm, n, row);
    worker.kernels->add(row, nullptr, scale, h + static_cast<int64_t>(t) * n, n);
  }
}

void op_norm_gate_up(Worker &worker, const llmr_instr &in, const llmr_step &step) {
  const int width = in.i[1], inner = in.i[2], activation = in.i[3];
  // The gate comes last: without one there is one piece.
  const Piece pieces[2] = {{weight_at(in, 5), floats_at(in, 6), 0}, {weight_at(in, 3), floats_at(in, 4), 0}};
  const Piece &up = pieces[0], &gate = pieces[1];
  float *a = floats_at(in, 7);
  const Source source = {floats_at(in, 0), width, nullptr, norm_of(in), width};
  const bool is_gated = gate.weight != nullptr;
  const Inputs inputs = prepare(worker, source, step.n_tokens, pieces, is_gated ? 2 : 1);
  const int64_t bytes = panel_bytes(*up.weight) + (is_gated ? panel_bytes(*gate.weight) : 0);
  const Chunks chunks(worker, up.weight->panels, inputs.tokens, bytes, width);
  for (int i = worker.take(); i < chunks.count(); i = worker.take())
    gate_up_chunk(worker, gate, up, inputs, chunks.chunk(i), activation, a, inner);
}

void op_norm_head(Worker &worker, const llmr_instr &in, const llmr_step &step) {
  const int width = in.i[1], vocab = in.i[2];
  const float scale = in.f[2], softcap = in.f[3];
  const Piece piece = {weight_at(in, 3), floats_at(in, 4), 0};
  float *logits = floats_at(in, 5);
  const Source source = {floats_at(in, 0), width, step.rows, norm_of(in), width};
  const Inputs inputs = prepare(worker, source, step.n_rows, &piece, 1);
  float *direct = scale == 1.f && softcap == 0.f ? logits : nullptr;
  multiply(worker, inputs, &piece, 1, direct, vocab, [&](const Piece &, int first, int rows, int t, const float *values) {
    float *out = logits + static_cast<int64_t>(t) * vocab + first;
    for (int r = 0; r < rows; r++) out[r] = (values[r] + (piece.bias ? piece.bias[first + r] : 0.f)) * scale;
    if (softcap != 0.f) worker.kernels->cap(out, rows, softcap);
  });
}

}  // namespace llmr
