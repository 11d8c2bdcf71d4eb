// Products of weights and activations inside an op: preparing the activations each kind of weight
// wants, and handing out pieces of the output to the workers.
#pragma once
#include "kernels.h"

namespace llmr {

// A weight and its bias (or null), and the first column of its rows in the output.
struct Piece {
  const llmr_weight *weight;
  const float *bias;
  int column;
};

// Activations in every form that a set of weights wants: fp32 always, quantized where needed.
struct Inputs {
  int tokens, k;
  const float *x;  // row t at x + t * ldx
  int64_t ldx;
  Acts acts[3], fine[3];  // fine[i] refines acts[i], where they stand beside 4-bit weights
  int n_acts;
};

// Tokens from group to group of an Acts. Of many tokens, a cache line of scales belongs to one worker,
// and an odd number of lines keeps the groups of a token from meeting in one set of the cache.
int stride_of(int tokens);

// Where the rows of x come from: row t of the op is rows[t] (or t) of x.
struct Source {
  const float *x;
  int64_t ldx;
  const int32_t *rows;
  Norm norm;
  int k;
};
constexpr Norm NO_NORM = {LLMR_NO_NORM, nullptr, nullptr, 0.f, 0.f};

// The norm of an op: its kind is i[0], gamma and beta p[1] and p[2], eps and offset f[0] and f[1].
static inline Norm norm_of(const llmr_instr &in) {
  return {in.i[0], static_cast<const float *>(in.p[1]), static_cast<const float *>(in.p[2]), in.f[0], in.f[1]};
}

// Norms and quantizes `tokens` rows for `pieces`. With few tokens every worker does all of them for
// itself, which costs less than a barrier; else they share the work and a barrier is passed.
// `spare` bytes of common memory are left alone at its start.
Inputs prepare(Worker &, const Source &, int tokens, const Piece *pieces, int n_pieces, size_t spare = 0);

// Rows of one piece times tokens: out[t - t0][16 * (p - p0) + r], padded rows included.
void product(Worker &, const llmr_weight *, int p0, int p1, const Inputs &, int t0, int t1, float *out,
             int64_t ldo);

// A part of the work on `panels` panels and `tokens` tokens.
struct Chunk {
  int p0, p1, t0, t1;
};

// Cuts the work into chunks that all workers agree on; chunk(i) for i below count().
class Chunks {
 public:
  Chunks(const Worker &, int panels, int tokens, int64_t bytes_per_panel, int k);
  int count() const { return n_panel_blocks_ * n_token_blocks_; }
  Chunk chunk(int i) const;
  int64_t row_floats() const { return static_cast<int64_t>(panel_block_) * ROWS; }

 private:
  int panels_, tokens_, panel_block_, token_block_, n_panel_blocks_, n_token_blocks_;
};

int64_t panel_bytes(const llmr_weight &);

// a[t * lda + row] = activation(gate) * up for the rows and tokens of a chunk; gate.weight null: no gate.
void gate_up_chunk(Worker &, const Piece &gate, const Piece &up, const Inputs &, const Chunk &, int activation,
                   float *a, int64_t lda);

// Memory of a worker for one chunk's products: at least TILE_FLOATS floats.
constexpr int64_t TILE_FLOATS = 128 * 1024;
float *tile_memory(Worker &);
void *matmul_scratch(Worker &);

}  // namespace llmr
