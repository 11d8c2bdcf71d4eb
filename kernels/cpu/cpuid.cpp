// Instruction sets from cpuid and XGETBV; bit numbers are those of Intel's manual, volumes 1 and 2.
#include "cpuid.h"

#include "abi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmr {
namespace {

enum Register { EAX, EBX, ECX, EDX };

constexpr uint64_t AVX_STATE = 0x6;       // XCR0: xmm and the upper halves of ymm
constexpr uint64_t ZMM_STATE = 0xe0;      // masks, upper halves of zmm0..15, zmm16..31
constexpr uint64_t TILE_STATE = 0x60000;  // tile configuration and data

// True if all the given bits of a register are set.
template <typename... Bits>
bool all(uint32_t word, Bits... bits) {
  const uint32_t wanted = ((uint32_t(1) << bits) | ...);
  return (word & wanted) == wanted;
}

uint32_t bits(const Features &f) {
  return f.x86_64_v2 * FEATURE_X86_64_V2 | f.avx2_fma_f16c * FEATURE_AVX2_FMA_F16C |
         f.avxvnni * FEATURE_AVXVNNI | f.avx512 * FEATURE_AVX512 | f.amx_int8 * FEATURE_AMX_INT8;
}

}  // namespace

Features decode(const uint32_t leaf1[4], const uint32_t leaf7_0[4], const uint32_t leaf7_1[4],
                uint64_t xcr0) {
  // Without OSXSAVE the system has switched no extended state on and XCR0 cannot be read.
  const uint64_t state = all(leaf1[ECX], 27) ? xcr0 : 0;
  const bool ymm = (state & AVX_STATE) == AVX_STATE;
  const bool zmm = ymm && (state & ZMM_STATE) == ZMM_STATE;
  const bool tiles = (state & TILE_STATE) == TILE_STATE;

  Features f = {};
  f.x86_64_v2 = all(leaf1[ECX], 0, 9, 13, 19, 20, 23);  // SSE3, SSSE3, CX16, SSE4.1, SSE4.2, POPCNT
  f.avx2_fma_f16c = f.x86_64_v2 && ymm && all(leaf1[ECX], 12, 28, 29) && all(leaf7_0[EBX], 5);
  f.avxvnni = f.avx2_fma_f16c && all(leaf7_1[EAX], 4);
  f.avx512 = f.avx2_fma_f16c && zmm && all(leaf7_0[EBX], 16, 17, 30, 31) && all(leaf7_0[ECX], 11);
  f.amx_int8 = f.avx512 && tiles && all(leaf7_0[EDX], 24, 25);
  return f;
}

#if defined(__x86_64__)

Features detect() {
  uint32_t leaf1[4] = {}, leaf7_0[4] = {}, leaf7_1[4] = {};
  const uint32_t last = __get_cpuid_max(0, nullptr);
  if (last >= 1) __cpuid(1, leaf1[EAX], leaf1[EBX], leaf1[ECX], leaf1[EDX]);
  if (last >= 7) {
    __cpuid_count(7, 0, leaf7_0[EAX], leaf7_0[EBX], leaf7_0[ECX], leaf7_0[EDX]);
    // eax of the first part is the number of the last; asking beyond it may repeat another leaf.
    if (leaf7_0[EAX] >= 1) __cpuid_count(7, 1, leaf7_1[EAX], leaf7_1[EBX], leaf7_1[ECX], leaf7_1[EDX]);
  }
  uint64_t xcr0 = 0;
  if (all(leaf1[ECX], 27)) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    xcr0 = uint64_t(high) << 32 | low;
  }
  return decode(leaf1, leaf7_0, leaf7_1, xcr0);
}

#else

Features detect() { return {}; }

#endif

bool request_amx() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
  return false;
#endif
}

}  // namespace llmr

LLMR_API uint32_t llmr_decode_features(const uint32_t *leaf1, const uint32_t *leaf7_0,
                                       const uint32_t *leaf7_1, uint64_t xcr0) {
  return llmr::bits(llmr::decode(leaf1, leaf7_0, leaf7_1, xcr0));
}

LLMR_API uint32_t llmr_features() { return llmr::bits(llmr::detect()); }
