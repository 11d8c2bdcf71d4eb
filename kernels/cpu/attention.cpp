// rope_append and attend: which worker does what. The arithmetic is the table's.
#include "attention.h"

#include <math.h>

namespace llmr {
namespace {

constexpr int64_t ROUND_FLOATS = 4 << 20;  // of partial results in memory at a time (16 MiB)

size_t element_bytes(const llmr_kv &kv) { return kv.type == LLMR_F16 ? 2 : 4; }

// Byte offset of a position of one kv head, in keys and in values.
size_t cache_offset(const llmr_kv &kv, int slot, int kv_head, int position) {
  const size_t row = (static_cast<size_t>(slot) * kv.n_kv_heads + kv_head) * kv.capacity + position;
  return row * kv.head_dim * element_bytes(kv);
}

// ---- attend -----------------------------------------------------------------------------------------

// The op's attributes. A group is a kv head with its query heads, or a part of them if they are many.
struct Attention {
  const llmr_instr &instr;
  const llmr_kv &kv;
  int heads, kv_heads, dim, parts;

  explicit Attention(const llmr_instr &in) : instr(in), kv(*static_cast<const llmr_kv *>(in.p[2])) {
    heads = in.i[0], kv_heads = in.i[1], dim = in.i[2];
    parts = (heads / kv_heads + MAX_TILE_HEADS - 1) / MAX_TILE_HEADS;
  }

  int groups() const { return kv_heads * parts; }

  // Tokens first .. first + count - 1 of a span with the query heads of a group.
  AttendTile tile(const llmr_span &span, int group, int first, int count) const {
    const int kv_head = group / parts, part = group % parts, per_kv = heads / kv_heads;
    const int begin = per_kv * part / parts, end = per_kv * (part + 1) / parts;
    const int head = kv_head * per_kv + begin, row = span.start + first;
    AttendTile t;
    t.query_stride = static_cast<int64_t>(heads + 2 * kv_heads) * dim;
    t.out_stride = static_cast<int64_t>(heads) * dim;
    t.queries = static_cast<const float *>(instr.p[0]) + row * t.query_stride + head * dim;
    t.out = static_cast<float *>(instr.p[1]) + row * t.out_stride + head * dim;
    const size_t offset = cache_offset(kv, span.slot, kv_head, 0);
    t.keys = static_cast<const uint8_t *>(kv.keys) + offset;
    t.values = static_cast<const uint8_t *>(kv.values) + offset;
    t.sinks = instr.p[3] == nullptr ? nullptr : static_cast<const float *>(instr.p[3]) + head;
    t.type = kv.type;
    t.head_dim = dim;
    t.n_tokens = count;
    t.n_heads = end - begin;
    t.position = span.position + first;
    t.window = instr.i[3];
    t.scale = instr.f[0];
    t.softcap = instr.f[1];
    return t;
  }
};

// The tiles of a prefilled span: of nearly equal numbers of tokens, and enough of them for all workers.
// Results do not depend on the tiling.
struct Tiling {
  int tokens, count;

  Tiling(const Attention &attention, const llmr_span &span, int workers) {
    const int per_kv = attention.heads / attention.kv_heads;
    const int heads = (per_kv + attention.parts - 1) / attention.parts;
    int most = MAX_TILE_ROWS / heads;
    if (most > 256) most = 256;
    // About four tiles for each worker, so that one who started late or is slowed down does not hold
    // up the others, as long as a tile keeps enough rows to pay for its conversion of the keys.
    const int64_t share = static_cast<int64_t>(span.count) * attention.groups() / (4 * workers);
    const int least = 48 / heads > 8 ? 48 / heads : 8;
    if (share < most) most = share > least ? static_cast<int>(share) : (least < most ? least : most);
    count = (span.count + most - 1) / most;
    tokens = (span.count + count - 1) / count;
    count = (span.count + tokens - 1) / tokens;
  }
};

int count_tiles(const Attention &attention, const llmr_step &step, int workers) {
  int tiles = 0;
  for (int s = 0; s < step.n_spans; s++)
    if (step.spans[s].count > DECODE_TOKENS)
      tiles += Tiling(attention, step.spans[s], workers).count * attention.groups();
  return tiles;
}

// Tile `number` of the step. The last tokens of a span come first: they see the most keys.
void attend_tile(Worker &w, const Attention &attention, const llmr_step &step, int number) {
  for (int s = 0; s < step.n_spans; s++) {
    const llmr_span &span = step.spans[s];
    if (span.count <= DECODE_TOKENS) continue;
    const Tiling tiling(attention, span, w.n);
    const int tiles = tiling.count * attention.groups();
    if (number < tiles) {
      const int first = (tiling.count - 1 - number / attention.groups()) * tiling.tokens;
      const int count = span.count - first < tiling.tokens ? span.count - first : tiling.tokens;
      const AttendTile tile = attention.tile(span, number % attention.groups(), first, count);
      return w.kernels->attend(&tile, w.scratch);
    }
    number -= tiles;
  }
}

// Walks the groups of all spans of a few tokens, numbering their chunks and placing their partial results.
class Groups {
 public:
  Groups(const Attention &attention, const llmr_step &step) : attention_(&attention), step_(&step) {
    settle();
  }

  bool valid() const { return span_ < step_->n_spans; }
  AttendTile tile() const {
    const llmr_span &span = step_->spans[span_];
    return attention_->tile(span, group_, 0, span.count);
  }
  int chunks() const { return end_chunk(tile()) - llmr::first_chunk(tile()); }
  int64_t floats() const { return chunks() * partial_floats(tile()); }
  int first_chunk() const { return chunk_; }  // number of the group's first chunk
  int64_t offset() const { return offset_; }  // of its partial results

  void next() {
    chunk_ += chunks();
    offset_ += floats();
    if (++group_ == attention_->groups()) {
      group_ = 0;
      span_++;
      settle();
    }
  }
  void restart_numbers() { chunk_ = 0, offset_ = 0; }

 private:
  void settle() {
    while (valid() && step_->spans[span_].count > DECODE_TOKENS) span_++;
  }

  const Attention *attention_;
  const llmr_step *step_;
  int span_ = 0, group_ = 0, chunk_ = 0;
  int64_t offset_ = 0;
};

// As many groups as one round's memory holds, at least one.
Groups end_of_round(Groups at, bool *merges) {
  *merges = false;
  do {
    *merges |= at.chunks() > 1;
    at.next();
  } while (at.valid() && at.offset() + at.floats() <= ROUND_FLOATS);
  return at;
}

int64_t round_floats(Groups at) {
  int64_t most = 0;
  bool merges;
  for (; at.valid(); at.restart_numbers()) {
    at = end_of_round(at, &merges);
    if (at.offset() > most) most = at.offset();
  }
  return most;
}

// A group of a single chunk is finished by the one who has it.
void attend_chunk(Worker &w, const Groups &group, int number, float *partials) {
  const AttendTile tile = group.tile();
  float *partial = partials + group.offset() + number * partial_floats(tile);
  w.kernels->attend_chunk(&tile, first_chunk(tile) + number, partial, w.scratch);
  if (group.chunks() == 1) w.kernels->attend_merge(&tile, partial);
}

void merge_round(Worker &w, Groups at, int end, float *partials) {
  int number = 0;
  for (int taken = w.take(); at.first_chunk() < end; at.next()) {
    if (at.chunks() == 1 || number++ != taken) continue;
    const AttendTile tile = at.tile();
    w.kernels->attend_merge(&tile, partials + at.offset());
    taken = w.take();
  }
}

}  // namespace

void op_attend(Worker &w, const llmr_instr &instr, const llmr_step &step) {
  const Attention attention(instr);
  int tiles = count_tiles(attention, step, w.n);
  Groups begin(attention, step);
  float *partials = nullptr;
  if (begin.valid()) partials = reinterpret_cast<float *>(w.common(round_floats(begin) * sizeof(float)));

  for (bool more = true; more;) {
    bool merges = false;
    Groups end = begin.valid() ? end_of_round(begin, &merges) : begin;
    Groups at = begin;
    for (int number = w.take(); number < tiles + end.first_chunk(); number = w.take()) {
      if (number < tiles) {
        attend_tile(w, attention, step, number);
        continue;
      }
      while (number - tiles >= at.first_chunk() + at.chunks()) at.next();
      attend_chunk(w, at, number - tiles - at.first_chunk(), partials);
    }
    more = end.valid();
    if (merges || more) w.barrier();
    if (merges) {
      merge_round(w, begin, end.first_chunk(), partials);
      if (more) w.barrier();
    }
    begin = end;
    begin.restart_numbers();
    tiles = 0;
  }
}

// ---- rope_append ------------------------------------------------------------------------------------

namespace {

// Cosines [n freq] and sines [n freq] of a position's angles, which are rounded to fp32 as the reference
// does. The first layer computes them, the others find them. Two workers may do so at once: both write
// the same values, and the byte that says so comes last.
const float *angles_of(const llmr_instr &in, int position) {
  const int n = in.i[5];
  float *angles = static_cast<float *>(in.p[7]) + static_cast<int64_t>(position) * 2 * n;
  uint8_t *ready = static_cast<uint8_t *>(in.p[8]) + position;
  if (__atomic_load_n(ready, __ATOMIC_ACQUIRE) != 0) return angles;
  const float *inv_freq = static_cast<const float *>(in.p[5]);
  const float factor = in.f[4];
  for (int i = 0; i < n; i++) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    angles[i] = cosf(angle) * factor;
    angles[n + i] = sinf(angle) * factor;
  }
  __atomic_store_n(ready, 1, __ATOMIC_RELEASE);
  return angles;
}

// What rope_append does with the heads of a token: 0 .. H - 1 queries, then Hkv keys, then Hkv values.
struct Append {
  const llmr_instr &in;
  const llmr_kv &kv;
  const Kernels &kernels;
  int heads, kv_heads, dim, n_freq;
  Norm q_norm, k_norm;

  Append(const Worker &w, const llmr_instr &instr)
      : in(instr), kv(*static_cast<const llmr_kv *>(instr.p[6])), kernels(*w.kernels) {
    heads = in.i[2], kv_heads = in.i[3], dim = in.i[4], n_freq = in.i[5];
    q_norm = norm(0), k_norm = norm(1);
  }

  Norm norm(int which) const {
    const float *gamma = static_cast<const float *>(in.p[1 + 2 * which]);
    const float *beta = static_cast<const float *>(in.p[2 + 2 * which]);
    return {in.i[which], gamma, beta, in.f[2 * which], in.f[2 * which + 1]};
  }
  int per_token() const { return heads + 2 * kv_heads; }
  bool is_whole() const { return q_norm.kind == LLMR_WHOLE_RMS_NORM || k_norm.kind == LLMR_WHOLE_RMS_NORM; }

  // The norms over all heads of a token, which one worker has then.
  void norm_token(float *token) const {
    if (q_norm.kind == LLMR_WHOLE_RMS_NORM) kernels.normalize(token, q_norm, heads * dim, token);
    float *keys = token + heads * dim;
    if (k_norm.kind == LLMR_WHOLE_RMS_NORM) kernels.normalize(keys, k_norm, kv_heads * dim, keys);
  }

  void append(int head, float *x, int slot, int position, const float *angles) const {
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;
    if (!is_value) {
      const Norm &norm = is_query ? q_norm : k_norm;
      if (norm.kind == LLMR_RMS_NORM) kernels.normalize(x, norm, dim, x);
      if (n_freq > 0) kernels.rotate(x, angles, angles + n_freq, n_freq);
    }
    if (is_query) return;
    const int kv_head = head - heads - (is_value ? kv_heads : 0);
    uint8_t *cache = static_cast<uint8_t *>(is_value ? kv.values : kv.keys);
    kernels.store(x, cache + cache_offset(kv, slot, kv_head, position), dim, kv.type);
  }
};

}  // namespace

void op_rope_append(Worker &w, const llmr_instr &in, const llmr_step &step) {
  const Append op(w, in);
  // Heads of all tokens in equal shares, or whole tokens: short work, not worth a shared counter.
  const int per_token = op.per_token(), unit = op.is_whole() ? per_token : 1;
  const int64_t total = static_cast<int64_t>(step.n_tokens) * (per_token / unit);
  const int64_t begin = total * w.id / w.n * unit, end = total * (w.id + 1) / w.n * unit;
  float *y = static_cast<float *>(in.p[0]);
  const float *angles = nullptr;
  int64_t token = -1;
  const llmr_span *span = step.spans;
  for (int64_t i = begin; i < end; i++) {
    if (i / per_token != token) {
      token = i / per_token;
      while (token >= span->start + span->count) span++;
      if (op.n_freq > 0) angles = angles_of(in, step.positions[token]);
      if (unit > 1) op.norm_token(y + i * op.dim);
    }
    const int head = static_cast<int>(i % per_token);
    op.append(head, y + i * op.dim, span->slot, step.positions[token], angles);
  }
}

}  // namespace llmr
