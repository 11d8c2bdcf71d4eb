// The functions Python calls. A context is used by one thread at a time.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dispatch.h"
#include "pick.h"
#include "pool.h"

struct llmr_context {
  llmr::Pool *pool;
  const llmr::Kernels *kernels;
  int threads;
  pid_t process;  // threads do not survive a fork: a child makes its own
};

namespace {

bool alive(llmr_context *context) {
  if (context->process == getpid()) return true;
  llmr::Pool *pool = llmr::Pool::create(context->threads, context->kernels);
  if (pool == nullptr) return false;
  context->pool = pool;  // the parent's is left as it is: its threads are not here to be joined
  context->process = getpid();
  return true;
}

}  // namespace

LLMR_API int32_t llmr_abi_version() { return LLMR_ABI; }

// Sizes of the shared structures, in the order of abi.h, so that Python can compare its own.
LLMR_API void llmr_abi_sizes(int32_t *sizes) {
  const int32_t all[] = {sizeof(llmr_weight), sizeof(llmr_source),       sizeof(llmr_kv),         sizeof(llmr_span),
                         sizeof(llmr_step),   sizeof(llmr_instr),        sizeof(llmr_pick_request), sizeof(llmr_pick_result)};
  memcpy(sizes, all, sizeof all);
}

// The best instruction set of this machine.
LLMR_API const char *llmr_isa() { return llmr::find_kernels(nullptr)->name; }

// Null if the instruction set cannot be used here (null or "": the best one) or there is no memory.
LLMR_API llmr_context *llmr_create(int32_t threads, const char *isa) {
  const llmr::Kernels *kernels = llmr::find_kernels(isa);
  if (kernels == nullptr) return nullptr;
  llmr_context *context = static_cast<llmr_context *>(malloc(sizeof(llmr_context)));
  if (context == nullptr) return nullptr;
  llmr::Pool *pool = llmr::Pool::create(threads, kernels);
  if (pool == nullptr) {
    free(context);
    return nullptr;
  }
  *context = {pool, kernels, pool->size(), getpid()};
  return context;
}

LLMR_API void llmr_destroy(llmr_context *context) {
  if (context == nullptr) return;
  if (context->process == getpid()) {
    context->pool->~Pool();
    free(context->pool);
  }
  free(context);
}

LLMR_API const char *llmr_context_isa(const llmr_context *context) { return context->kernels->name; }

// Runs a program with at most `most` threads (0: all). Returns how many took part, 0 if threads could
// not be made.
LLMR_API int32_t llmr_run(llmr_context *context, const llmr_instr *program, int32_t length, const llmr_step *step,
                          int32_t most) {
  if (!alive(context)) return 0;
  context->pool->run({program, length, step}, most);
  return context->pool->active();
}

LLMR_API int32_t llmr_pick(llmr_context *context, const float *logits, const llmr_pick_request *request,
                           llmr_pick_result *result) {
  return llmr::pick(*context->kernels, logits, *request, *result);
}

// Reads `bytes` of memory once with all threads; the best of several calls is the bandwidth.
LLMR_API int32_t llmr_read(llmr_context *context, const void *memory, uint64_t bytes) {
  if (!alive(context)) return 0;
  context->pool->read(memory, bytes);
  return context->pool->active();
}
