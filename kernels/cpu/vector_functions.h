// The functions of the table over the F of the file that includes this, in the namespace of its instruction
// set. No include guard: three files include it once each.
void normalize(const float *x, const Norm &norm, int n, float *out) { llmr::normalize<F>(x, norm, n, out); }
void gate_up(const float *gate, const float *up, float *out, int n, int activation) {
  llmr::gate_up<F>(gate, up, out, n, activation);
}
void finish(const float *x, const float *bias, float *out, int n) { llmr::finish<F>(x, bias, out, n); }
void add(const float *x, const float *bias, float scale, float *out, int n) {
  llmr::add<F>(x, bias, scale, out, n);
}
void cap(float *x, int n, float softcap) { llmr::cap<F>(x, n, softcap); }
void rotate(float *head, const float *cos, const float *sin, int n_freq) {
  llmr::rotate<F>(head, cos, sin, n_freq);
}
void store(const float *x, void *out, int n, int type) { llmr::store<F>(x, out, n, type); }
bool largest(const float *x, int n, float *value, int *index) { return llmr::largest<F>(x, n, value, index); }
double sum_exp(const float *x, int n, float shift) { return llmr::sum_exp<F>(x, n, shift); }
void attend(const AttendTile *tile, void *scratch) { llmr::attend_tile<F>(*tile, scratch); }
void attend_chunk(const AttendTile *tile, int chunk, float *partial, void *scratch) {
  llmr::attend_chunk<F>(*tile, chunk, partial, scratch);
}
void attend_merge(const AttendTile *tile, const float *partials) { llmr::attend_merge<F>(*tile, partials); }
