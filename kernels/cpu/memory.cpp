// Memory for weights and the cache: page-aligned, zero, and in huge pages where the system gives them.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

#if defined(__linux__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {
constexpr size_t HUGE_PAGE = 2 << 20;
}

// Zero bytes that cost memory only where they are touched; null if there are none. With `huge` they
// start at a huge page: streaming weights through 4 KB pages is bound by address translation (8.6
// against 16.6 GB/s with one thread on a Xeon, 17.6 against 31.2 with two; bandwidth benchmark).
LLMR_API void *llmr_alloc(uint64_t bytes, int32_t huge) {
#if defined(__linux__) || defined(__APPLE__)
  const size_t extra = huge ? HUGE_PAGE : 0, page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t whole = (bytes + page - 1) / page * page;
  void *raw = mmap(nullptr, whole + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  uint8_t *start = static_cast<uint8_t *>(raw);
  if (extra) {
    uint8_t *aligned = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(start) + extra - 1) & ~(extra - 1));
    if (aligned > start) munmap(start, aligned - start);
    const size_t tail = extra - (aligned - start);
    if (tail > 0) munmap(aligned + whole, tail);
    start = aligned;
#if defined(MADV_HUGEPAGE)
    madvise(start, bytes, MADV_HUGEPAGE);
#endif
  }
  return start;
#else
  (void)huge;
  return calloc(1, bytes);
#endif
}

LLMR_API void llmr_free(void *memory, uint64_t bytes) {
#if defined(__linux__) || defined(__APPLE__)
  if (memory != nullptr) munmap(memory, bytes);
#else
  (void)bytes;
  free(memory);
#endif
}

// n elements of an llmr_type as fp32.
LLMR_API void llmr_widen(int32_t type, const void *from, float *to, int64_t n) {
  if (type == LLMR_F32) {
    memcpy(to, from, sizeof(float) * n);
    return;
  }
  const uint16_t *source = static_cast<const uint16_t *>(from);
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = static_cast<uint32_t>(source[i]) << 16;
    if (type == LLMR_F16) {
      // Exponent and mantissa moved into place and scaled by 2^112: right for sub-normals too.
      const uint32_t sign = bits & 0x80000000u, rest = (source[i] & 0x7fffu) << 13;
      float value;
      memcpy(&value, &rest, 4);
      value *= 0x1p112f;
      memcpy(&bits, &value, 4);
      if ((source[i] & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;
      bits |= sign;
    }
    memcpy(to + i, &bits, 4);
  }
}
