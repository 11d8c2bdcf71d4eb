#include "pick.h"

#include <math.h>
#include <stdlib.h>

#include <algorithm>

namespace llmr {
namespace {

constexpr int SLACK = 1024;  // candidates collected beyond the wanted ones before they are thinned out

// For top-p, ids are sorted only where the nucleus ends: first they are binned by their distance from
// the largest scaled score. At DEEPEST even 2^31 terms do not reach the last bit of a softmax.
constexpr int DEEPEST = 60, BINS_PER_UNIT = 16, N_BINS = DEEPEST * BINS_PER_UNIT;

template <class T>
class Array {
 public:
  explicit Array(size_t n) : data_(static_cast<T *>(malloc((n ? n : 1) * sizeof(T)))) {}
  ~Array() { free(data_); }
  Array(const Array &) = delete;
  Array &operator=(const Array &) = delete;
  operator T *() { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  T *data_;
};

// Scores of all ids: the logits themselves, or a copy in double that bias, mask and penalty changed.
struct Scores {
  const float *logits;
  const double *adjusted;  // null: use the logits
  int n;
  double largest;  // over all ids; -infinity if nothing is allowed
  int best_id;     // the lowest id that has it

  double operator[](int id) const { return adjusted ? adjusted[id] : logits[id]; }
};

struct Candidate {
  double scaled;  // score / temperature
  double score;
  int32_t id;
};

bool ahead(const Candidate &a, const Candidate &b) {
  return a.scaled > b.scaled || (a.scaled == b.scaled && a.id < b.id);
}

// ---- bias, mask, penalty --------------------------------------------------------------------------

bool changes_scores(const llmr_pick_request &r) {
  return r.n_bias > 0 || r.allowed != nullptr || (r.repeat_penalty != 1.0 && r.n_history > 0);
}

bool in_vocab(const llmr_pick_request &r, int32_t id) { return id >= 0 && id < r.vocab; }

// Writes the changed scores to `scores` [vocab]. `marks` [vocab] is scratch.
void adjust(const float *logits, const llmr_pick_request &r, double *scores, uint8_t *marks) {
  for (int id = 0; id < r.vocab; id++) scores[id] = logits[id];
  for (int i = 0; i < r.n_bias; i++)
    if (in_vocab(r, r.bias_ids[i])) scores[r.bias_ids[i]] += r.bias[i];
  if (r.allowed != nullptr) {
    std::fill(marks, marks + r.vocab, uint8_t{0});
    for (int i = 0; i < r.n_allowed; i++)
      if (in_vocab(r, r.allowed[i])) marks[r.allowed[i]] = 1;
    for (int id = 0; id < r.vocab; id++)
      if (!marks[id]) scores[id] = -INFINITY;
  }
  if (r.repeat_penalty == 1.0 || r.n_history == 0) return;
  std::fill(marks, marks + r.vocab, uint8_t{0});
  for (int i = 0; i < r.n_history; i++) {
    const int32_t id = r.history[i];
    if (!in_vocab(r, id) || marks[id]) continue;
    marks[id] = 1;
    scores[id] = scores[id] > 0 ? scores[id] / r.repeat_penalty : scores[id] * r.repeat_penalty;
  }
}

void find_largest(Scores &s) {
  s.largest = -INFINITY;
  s.best_id = 0;
  for (int id = 0; id < s.n; id++)
    if (s.adjusted[id] > s.largest) {
      s.largest = s.adjusted[id];
      s.best_id = id;
    }
}

// ---- the best few ---------------------------------------------------------------------------------

// Puts the first `wanted` in the order of `ahead` into `out` [capacity], sorted, and returns how many
// there are: fewer if fewer ids are allowed. capacity > wanted unless it holds the whole vocabulary.
template <class T>
int best_of(const T *scores, int n, double temperature, int wanted, Candidate *out, int capacity) {
  int count = 0;
  // Ids come in ascending order, so a later one that is not larger than the last of the wanted ones
  // cannot displace it. At first this keeps forbidden ids out.
  double beyond = -INFINITY;
  for (int id = 0; id < n; id++) {
    const double score = scores[id];
    if (!(score > beyond)) continue;
    if (count == capacity) {
      std::nth_element(out, out + wanted - 1, out + count, ahead);
      count = wanted;
      beyond = out[wanted - 1].score;
      if (!(score > beyond)) continue;
    }
    out[count++] = {score / temperature, score, id};
  }
  if (count > wanted) std::nth_element(out, out + wanted - 1, out + count, ahead);
  count = std::min(count, wanted);
  std::sort(out, out + count, ahead);
  return count;
}

int capacity_for(int wanted, int n) {
  return static_cast<int>(std::min<int64_t>(n, 2 * static_cast<int64_t>(wanted) + SLACK));
}

int best_of(const Scores &s, double temperature, int wanted, Candidate *out, int capacity) {
  if (s.adjusted) return best_of(s.adjusted, s.n, temperature, wanted, out, capacity);
  return best_of(s.logits, s.n, temperature, wanted, out, capacity);
}

// ---- the draw -------------------------------------------------------------------------------------

// First word of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
// with key = seed and counter = (draw, id).
uint32_t random_word(uint64_t seed, uint64_t draw, uint32_t id) {
  uint32_t c0 = static_cast<uint32_t>(draw), c1 = static_cast<uint32_t>(draw >> 32), c2 = id, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// The id with the largest scaled score + Gumbel noise, among those shown to `consider`.
class Draw {
 public:
  Draw(uint64_t seed, uint64_t draw) : seed_(seed), draw_(draw) {}

  void consider(double scaled, int id) {
    const double lead = best_ - scaled;
    if (lead > LARGEST_NOISE) return;
    const uint32_t word = random_word(seed_, draw_, static_cast<uint32_t>(id));
    // noise = -log(-log u) <= -log(1 - u), and 1 - u has this many zero bits in front: most ids are
    // out without a logarithm.
    const int zeros = __builtin_clz(~word | 1u);
    if (lead > (zeros + 2) * LN2) return;
    const double u = (word + 0.5) / 4294967296.0;
    const double sum = scaled - log(-log(u));
    if (sum > best_ || (sum == best_ && id < id_) || id_ < 0) {
      best_ = sum;
      id_ = id;
    }
  }
  int id() const { return id_; }

 private:
  static constexpr double LARGEST_NOISE = 23.0;  // -log(-log(1 - 2^-33)) = 22.87
  static constexpr double LN2 = 0.6931471805599454;
  uint64_t seed_, draw_;
  double best_ = -INFINITY;
  int id_ = -1;
};

// Neither top-k nor top-p: no order is needed.
int draw_unsorted(const Scores &s, const llmr_pick_request &r) {
  const double top = s.largest / r.temperature;
  const double floor = r.min_p > 0 ? top + log(r.min_p) : -INFINITY;
  Draw draw(r.seed, r.draw);
  draw.consider(top, s.best_id);  // a good start: most others are out at once
  for (int id = 0; id < s.n; id++) {
    const double score = s[id];
    const double scaled = score / r.temperature;
    if (score > -INFINITY && scaled >= floor) draw.consider(scaled, id);
  }
  return draw.id();
}

// How many of the sorted candidates pass top-p and min-p. `sum` is that of all exponentials, `top`
// the largest scaled score, `before` the probability of everything ahead of these candidates.
int surviving(const Candidate *sorted, int n, double top, double sum, double before,
              const llmr_pick_request &r) {
  for (int i = 0; i < n; i++) {
    const double p = exp(sorted[i].scaled - top) / sum;
    const double total = before + p;
    if (!(total - p < r.top_p) || !(p >= r.min_p * (1.0 / sum))) return i;
    before = total;
  }
  return n;
}

PickStatus draw_top_k(const Scores &s, const llmr_pick_request &r, int32_t &id) {
  const int wanted = std::min(s.n, r.top_k);
  const int capacity = capacity_for(wanted, s.n);
  Array<Candidate> candidates(capacity);
  if (!candidates) return PICK_NO_MEMORY;
  const int count = best_of(s, r.temperature, wanted, candidates, capacity);
  const double top = candidates[0].scaled;
  double sum = 0;
  for (int i = 0; i < count; i++) sum += exp(candidates[i].scaled - top);
  const int kept = std::max(1, surviving(candidates, count, top, sum, 0.0, r));
  Draw draw(r.seed, r.draw);
  for (int i = 0; i < kept; i++) draw.consider(candidates[i].scaled, candidates[i].id);
  id = draw.id();
  return PICK_CHOSEN;
}

struct Bins {
  double mass[N_BINS];  // sum of exponentials
  int32_t count[N_BINS];
};

// The bin of a score so far below the largest (not above 0), N_BINS if too far or not a number.
int bin_of(double below) {
  return below > -DEEPEST ? static_cast<int>(-below * BINS_PER_UNIT) : N_BINS;
}

void fill_bins(const Scores &s, double inverse, Bins &bins) {
  std::fill(bins.mass, bins.mass + N_BINS, 0.0);
  std::fill(bins.count, bins.count + N_BINS, 0);
  for (int id = 0; id < s.n; id++) {
    const double below = (s[id] - s.largest) * inverse;
    const int bin = bin_of(below);
    if (bin >= N_BINS) continue;
    bins.mass[bin] += exp(below);
    bins.count[bin]++;
  }
}

PickStatus draw_top_p(const Scores &s, const llmr_pick_request &r, int32_t &id) {
  const double top = s.largest / r.temperature;
  const double inverse = 1.0 / r.temperature;  // for bins; scaled scores are quotients
  Bins bins;
  fill_bins(s, inverse, bins);
  double sum = 0;
  for (double mass : bins.mass) sum += mass;
  int last = 0;  // the bin in which the nucleus ends
  double before = 0;
  while (last < N_BINS - 1 && before + bins.mass[last] / sum < r.top_p) before += bins.mass[last++] / sum;

  Array<Candidate> candidates(bins.count[last]);
  if (!candidates) return PICK_NO_MEMORY;
  Draw draw(r.seed, r.draw);
  draw.consider(top, s.best_id);  // passes every filter, and rules most others out at once
  int count = 0;
  for (int i = 0; i < s.n; i++) {
    const double score = s[i];
    const int bin = bin_of((score - s.largest) * inverse);
    if (bin > last) continue;
    const double scaled = score / r.temperature;
    if (bin == last)
      candidates[count++] = {scaled, score, i};
    else if (exp(scaled - top) / sum >= r.min_p * (1.0 / sum))
      draw.consider(scaled, i);
  }
  std::sort(candidates + 0, candidates + count, ahead);
  const int kept = surviving(candidates, count, top, sum, before, r);
  for (int i = 0; i < kept; i++) draw.consider(candidates[i].scaled, candidates[i].id);
  id = draw.id();
  return PICK_CHOSEN;
}

// ---- probabilities --------------------------------------------------------------------------------

bool list_top(const float *logits, const llmr_pick_request &r, double largest, double log_sum,
              llmr_pick_result &result) {
  const int wanted = std::min(r.n_top, r.vocab);
  const int capacity = capacity_for(wanted, r.vocab);
  Array<Candidate> candidates(capacity);
  if (!candidates) return false;
  best_of(logits, r.vocab, 1.0, wanted, candidates, capacity);
  for (int i = 0; i < r.n_top; i++) {
    result.top_ids[i] = i < wanted ? candidates[i].id : -1;
    result.top_logprobs[i] = i < wanted ? candidates[i].score - largest - log_sum : -INFINITY;
  }
  return true;
}

// `s` holds the plain logits and their largest.
PickStatus choose(Scores s, const llmr_pick_request &r, int32_t &id) {
  const bool changed = changes_scores(r);
  Array<double> scores(changed ? r.vocab : 0);
  Array<uint8_t> marks(changed ? r.vocab : 0);
  if (!scores || !marks) return PICK_NO_MEMORY;
  if (changed) {
    adjust(s.logits, r, scores, marks);
    s.adjusted = scores;
    find_largest(s);
  }
  id = s.best_id;
  if (r.temperature == 0.0) return PICK_CHOSEN;
  if (s.largest == -INFINITY) return PICK_NOTHING_ALLOWED;
  if (r.top_k > 0) return draw_top_k(s, r, id);
  if (r.top_p < 1.0) return draw_top_p(s, r, id);
  id = draw_unsorted(s, r);
  return PICK_CHOSEN;
}

}  // namespace

int pick(const Kernels &kernels, const float *logits, const llmr_pick_request &request,
         llmr_pick_result &result) {
  result.token_id = -1;
  if (request.vocab <= 0) return result.status = PICK_NOTHING_ALLOWED;
  float largest;
  int best_id;
  if (!kernels.largest(logits, request.vocab, &largest, &best_id)) return result.status = PICK_NOT_FINITE;
  int32_t id = -1;
  const PickStatus status = choose({logits, nullptr, request.vocab, largest, best_id}, request, id);
  if (status != PICK_CHOSEN) return result.status = status;
  const double log_sum = log(kernels.sum_exp(logits, request.vocab, largest));
  result.token_id = id;
  result.logprob = static_cast<double>(logits[id]) - largest - log_sum;
  if (request.n_top > 0 && !list_top(logits, request, largest, log_sum, result))
    return result.status = PICK_NO_MEMORY;
  return result.status = PICK_CHOSEN;
}

}  // namespace llmr
