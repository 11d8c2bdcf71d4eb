// The loops of matmul_float, written once for vectors of 16 rows. Included by each ISA file within
// an anonymous namespace, after it has defined
//   Vec                    16 floats, a column of a panel
//   Splat                  one float for all rows
//   Words                  eight columns of four-bit codes of a panel (64 bytes)
//   Table                  16 floats to look up
//   zero(), load(p), store(p, vec), splat(f), load_half(p), load_bf16(p), load_words(p), load_table(p)
//   fma(splat, vec, acc), scaled(vec, vec)
//   look_up(table, words, i)   the table's values for column i = 0..7
//   panels_at_once(is_lut, tokens)   1, 2 or 4: as many as there are registers for
//   TOKENS                 most tokens of a tile
//   BLOCK                  columns that are converted at once; a multiple of 8
// Another file that includes it gets a copy of its own, compiled for its own instruction set.

// ---- where columns come from ----------------------------------------------------------------------
// Each source stands at a column of a panel. next() moves to the next eight, which column(i) gives.

int64_t first_element(const llmr_weight &w, int panel, int k) {
  return (static_cast<int64_t>(panel) * w.k_padded + k) * ROWS;
}

struct Floats {
  static constexpr bool IS_LUT = false;
  const float *at, *now;
  Floats() = default;
  Floats(const llmr_weight &w, int panel, int k)
      : at(reinterpret_cast<const float *>(w.codes) + first_element(w, panel, k)) {}
  explicit Floats(const float *converted) : at(converted) {}
  void next() {
    now = at;
    at += 8 * ROWS;
  }
  Vec column(int i) const { return load(now + i * ROWS); }
};

struct Words16 {
  static constexpr bool IS_LUT = false;
  const uint16_t *at, *now;
  Words16() = default;
  Words16(const llmr_weight &w, int panel, int k)
      : at(reinterpret_cast<const uint16_t *>(w.codes) + first_element(w, panel, k)) {}
  void next() {
    now = at;
    at += 8 * ROWS;
  }
};

struct Halves : Words16 {
  using Words16::Words16;
  Vec column(int i) const { return load_half(now + i * ROWS); }
};

struct Bfloats : Words16 {
  using Words16::Words16;
  Vec column(int i) const { return load_bf16(now + i * ROWS); }
};

Vec load_typed(const void *base, int64_t index, int type) {
  if (type == LLMR_F32) return load(static_cast<const float *>(base) + index);
  const uint16_t *words = static_cast<const uint16_t *>(base) + index;
  return type == LLMR_F16 ? load_half(words) : load_bf16(words);
}

struct Looked {
  static constexpr bool IS_LUT = true;
  const uint8_t *at;
  const llmr_weight *weight;
  int64_t scale_index;
  int left;  // columns the present scale still covers
  Table table;
  Words words;
  Vec scale;
  Looked() = default;
  Looked(const llmr_weight &w, int panel, int k)
      : at(w.codes + first_element(w, panel, k) / 2),
        weight(&w),
        scale_index((static_cast<int64_t>(panel) * (w.k_padded / w.group) + k / w.group) * ROWS),
        left(w.group - k % w.group),
        table(load_table(w.table)),
        scale(load_typed(w.scales, scale_index, w.type)) {}
  void next() {
    if (left == 0) {
      scale_index += ROWS;
      scale = load_typed(weight->scales, scale_index, weight->type);
      left = weight->group;
    }
    left -= 8;
    words = load_words(at);
    at += 8 * ROWS / 2;
  }
  Vec column(int i) const { return scaled(look_up(table, words, i), scale); }
};

// ---- a tile: R panels times T tokens, `columns` columns -------------------------------------------

// Row t of x at x + t * ldx, its products at out + t * ldo. `more`: out holds the sums so far.
template <class S, int R, int T>
void tile(S *sources, int columns, const float *x, int64_t ldx, float *out, int64_t ldo, bool more) {
  Vec acc[T][R];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) acc[t][r] = more ? load(out + t * ldo + r * ROWS) : zero();

  S local[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) local[r] = sources[r];
  const auto add_column = [&](int k, int i) __attribute__((always_inline)) {
    Vec w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) w[r] = local[r].column(i);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const Splat value = splat(x[t * ldx + k + i]);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) acc[t][r] = fma(value, w[r], acc[t][r]);
    }
  };
  int k = 0;
  for (; k + 8 <= columns; k += 8) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) local[r].next();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) add_column(k, i);
  }
  if (k < columns) {
    for (int r = 0; r < R; r++) local[r].next();
    for (int i = 0; k + i < columns; i++) add_column(k, i);
  }

#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store(out + t * ldo + r * ROWS, acc[t][r]);
}

// The same for a number of tokens known only now, at most TOKENS.
template <class S, int R, int T = TOKENS>
void tile_of(int tokens, S *sources, int columns, const float *x, int64_t ldx, float *out, int64_t ldo,
             bool more) {
  if constexpr (T > 1) {
    if (tokens < T) return tile_of<S, R, T - 1>(tokens, sources, columns, x, ldx, out, ldo, more);
  }
  // More panels at once than there are registers for are never asked for.
  if constexpr (R <= panels_at_once(S::IS_LUT, T)) tile<S, R, T>(sources, columns, x, ldx, out, ldo, more);
}

struct Product {
  const llmr_weight *w;
  const float *x;  // of the first token
  int64_t ldx;
  int tokens;
  float *out;
  int64_t ldo;
  float *scratch;
};

// ---- few tokens: straight from the weight ---------------------------------------------------------

template <class S, int R>
void few_tokens(const Product &p, int panel, float *out) {
  S sources[R];
  for (int r = 0; r < R; r++) sources[r] = S(*p.w, panel + r, 0);
  tile_of<S, R>(p.tokens, sources, p.w->k, p.x, p.ldx, out, p.ldo, false);
}

// ---- many tokens: blocks of columns, converted once -----------------------------------------------

template <class S>
void convert(S source, int columns, float *out) {
  for (int k = 0; k < columns; k += 8, out += 8 * ROWS) {
    source.next();
    const int n = columns - k < 8 ? columns - k : 8;
    for (int i = 0; i < n; i++) store(out + i * ROWS, source.column(i));
  }
}
void convert(const Floats &, int, float *) {}  // read where they are

template <class S>
Floats converted(const llmr_weight &, int, int, const float *block) {
  return Floats(block);
}
template <>
Floats converted<Floats>(const llmr_weight &w, int panel, int k, const float *) {
  return Floats(w, panel, k);
}

template <class S, int R>
void many_tokens(const Product &p, int panel, float *out) {
  const int tiles = (p.tokens + TOKENS - 1) / TOKENS;
  for (int k = 0; k < p.w->k; k += BLOCK) {
    const int columns = p.w->k - k < BLOCK ? p.w->k - k : BLOCK;
    Floats sources[R];
    for (int r = 0; r < R; r++) {
      float *block = p.scratch + r * BLOCK * ROWS;
      convert(S(*p.w, panel + r, k), columns, block);
      sources[r] = converted<S>(*p.w, panel + r, k, block);
    }
    for (int i = 0; i < tiles; i++) {  // of near-equal width
      const int t0 = p.tokens * i / tiles, t1 = p.tokens * (i + 1) / tiles;
      tile_of<Floats, R>(t1 - t0, sources, columns, p.x + t0 * p.ldx + k, p.ldx, out + t0 * p.ldo, p.ldo,
                         k > 0);
    }
  }
}

// ---- all panels -----------------------------------------------------------------------------------

template <class S, int R>
void panels_by(const Product &p, int panel, float *out) {
  if (p.tokens > TOKENS)
    many_tokens<S, R>(p, panel, out);
  else
    few_tokens<S, R>(p, panel, out);
}

template <class S>
void multiply(const Product &p, int p0, int p1) {
  const int most = p.tokens > TOKENS ? panels_at_once(false, TOKENS) : panels_at_once(S::IS_LUT, p.tokens);
  float *out = p.out;
  while (p0 < p1) {
    const int left = p1 - p0;
    const int n = left >= 4 && most >= 4 ? 4 : left >= 2 && most >= 2 ? 2 : 1;
    if (n == 4)
      panels_by<S, 4>(p, p0, out);
    else if (n == 2)
      panels_by<S, 2>(p, p0, out);
    else
      panels_by<S, 1>(p, p0, out);
    p0 += n;
    out += n * ROWS;
  }
}

void multiply_any(const llmr_weight *w, int p0, int p1, const float *x, int64_t ldx, int t0, int t1,
                  float *out, int64_t ldo, void *scratch) {
  static_assert(4 * BLOCK * ROWS * sizeof(float) <= MATMUL_SCRATCH, "four panels are converted at once");
  const Product p = {w, x + t0 * ldx, ldx, t1 - t0, out, ldo, static_cast<float *>(scratch)};
  if (p.tokens <= 0) return;
  if (w->kind == LLMR_LUT4)
    multiply<Looked>(p, p0, p1);
  else if (w->type == LLMR_F32)
    multiply<Floats>(p, p0, p1);
  else if (w->type == LLMR_F16)
    multiply<Halves>(p, p0, p1);
  else
    multiply<Bfloats>(p, p0, p1);
}
