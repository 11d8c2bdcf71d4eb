#include "dispatch.h"

#include <string.h>

#include "cpuid.h"
#include "float.h"
#include "matmul.h"
#include "vector.h"
#if defined(LLMR_X86)
#include "matmul_amx.h"
#include "matmul_avx512.h"
#endif

namespace llmr {
namespace {

// Fields in the order of struct Kernels: integer matmul, float matmul, vector functions.
#define LLMR_TABLE(name, matmul_isa, refines, vector_isa)                                                \
  {name, matmul_isa::codes_bytes, matmul_isa::init_bytes, refines, matmul_isa::quantize, matmul_isa::matmul, \
   vector_isa::matmul_float, vector_isa::normalize, vector_isa::gate_up, vector_isa::finish,             \
   vector_isa::add, vector_isa::cap, vector_isa::rotate, vector_isa::store, vector_isa::attend,          \
   vector_isa::largest, vector_isa::sum_exp, vector_isa::attend_chunk, vector_isa::attend_merge, nullptr, nullptr}

const Kernels BASE = LLMR_TABLE("base", base, false, base);
#if defined(LLMR_X86)
const Kernels AVX2 = LLMR_TABLE("avx2", avx2, false, avx2);
const Kernels AVXVNNI = LLMR_TABLE("avxvnni", avxvnni, false, avx2);
const Kernels AVX512 = LLMR_TABLE("avx512", avx512, true, avx512);
const Kernels AMX = [] {
  Kernels kernels = LLMR_TABLE("amx", amx, true, avx512);
  kernels.gathered_bytes = amx::gathered_bytes;
  kernels.gather = amx::gather;
  return kernels;
}();
#endif
#undef LLMR_TABLE

// Best last.
struct Choice {
  const Kernels *kernels;
  bool usable;
};

}  // namespace

const Kernels *find_kernels(const char *name) {
  const Features has = detect();
  const bool best = name == nullptr || *name == 0;
  const Choice choices[] = {
      {&BASE, true},
#if defined(LLMR_X86)
      {&AVX2, has.avx2_fma_f16c},
      {&AVXVNNI, has.avxvnni},
      {&AVX512, has.avx512},
      // The kernel is asked for tiles only when they are wanted: it then saves 8 KB for each thread.
      {&AMX, has.amx_int8 && (best || strcmp(name, "amx") == 0) && request_amx()},
#endif
  };
  const Kernels *found = nullptr;
  for (const Choice &choice : choices)
    if (choice.usable && (best || strcmp(name, choice.kernels->name) == 0)) found = choice.kernels;
  (void)has;
  return found;
}

}  // namespace llmr
