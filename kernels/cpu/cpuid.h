// Which instruction sets this processor has and this system lets us use. Asked once, at start.
#pragma once
#include <stdint.h>

namespace llmr {

// Each level includes all that its files are compiled with, so one true field is enough to use it.
struct Features {
  bool x86_64_v2;      // SSE4.2, SSSE3, POPCNT, CMPXCHG16B: what the base files may need
  bool avx2_fma_f16c;
  bool avxvnni;        // the above and the VEX form of VNNI
  bool avx512;         // avx2_fma_f16c and F, BW, DQ, VL, VNNI
  bool amx_int8;       // avx512 and int8 tiles; before the first tile, request_amx() must say yes
};

// The same as bits, for Python: llmr_features() and llmr_decode_features(leaf1, leaf7_0, leaf7_1, xcr0).
constexpr uint32_t FEATURE_X86_64_V2 = 1 << 0, FEATURE_AVX2_FMA_F16C = 1 << 1, FEATURE_AVXVNNI = 1 << 2,
                   FEATURE_AVX512 = 1 << 3, FEATURE_AMX_INT8 = 1 << 4;

// What leaves 1, 7.0 and 7.1 of cpuid (eax, ebx, ecx, edx each; zeros where the processor has no such
// leaf) and XCR0 say. A set counts only if the system also saves the registers it needs: a hypervisor
// or kernel may show the instructions and fault on them.
Features decode(const uint32_t leaf1[4], const uint32_t leaf7_0[4], const uint32_t leaf7_1[4], uint64_t xcr0);

// This processor. All false on other architectures.
Features detect();

// Asks the kernel for the 8 KB of tile state; false if it refuses. Counts for the whole process, so it
// is called once, before any thread uses tiles, and only if AMX is chosen.
bool request_amx();

}  // namespace llmr
