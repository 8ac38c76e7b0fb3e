// The primitives of HIP kernels: ids, wave operations, the block barrier, LDS and matrix instructions. On a GPU each
// primitive compiles to instructions of a 64-lane wave. On the host each primitive is emulated (hip/emulation).
//
// All 64 lanes of a wave must reach a wave operation together, and all threads of a block must reach a block barrier
// together. The hardware does not report a violation of this rule, but the emulation does.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/math/ieee.h"

namespace rlk::hip {

constexpr int kWave = 64;

// The operands of a matrix instruction: four bfloat16 or binary16 numbers as raw bits, and fp32 accumulators.
struct Bf16x4 {
  std::uint16_t v[4];
};
struct Fp16x4 {
  std::uint16_t v[4];
};
template <int kCount>
struct Accumulator {
  float v[kCount];
};

}  // namespace rlk::hip

#if defined(__HIP__)
#include "wave_device.h"
#else
#include "hip/emulation/wave_emulation.h"
#endif

namespace rlk::hip {

RLK_DEVICE float shuffle_xor(float value, int mask RLK_HERE_PARAMETER) {
  return float_of(shuffle_xor(bits_of(value), mask RLK_HERE_ARGUMENT));
}
// Marks pointers as pointers to global memory, for code of rlk/tokens.h that HIP shares with CUDA.
struct GlobalMemory {
  template <class T>
  static RLK_DEVICE T* global(T* p) {
    return global_pointer(p);
  }
};
RLK_DEVICE bool any(bool value RLK_HERE_PARAMETER) { return ballot(value RLK_HERE_ARGUMENT) != 0; }

}  // namespace rlk::hip
