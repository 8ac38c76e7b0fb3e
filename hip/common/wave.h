// The primitives of HIP kernels: ids, wave operations, block barrier, LDS, matrix instructions. A GPU runs each
// operation as instructions of a 64-lane wave; the host emulates it (hip/emulation).
//
// All 64 lanes of a wave must reach a wave operation together, and all lanes of a block a barrier. The hardware does
// not report a violation; the emulation does.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/math/ieee.h"

namespace rlk::hip {

constexpr int kWave = 64;

// Operands of a matrix instruction: four bfloat16 or binary16 as raw bits; accumulators, fp32.
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
// For code that CUDA shares (rlk/tokens.h).
struct GlobalMemory {
  template <class T>
  static RLK_DEVICE T* global(T* p) {
    return global_pointer(p);
  }
};
RLK_DEVICE bool any(bool value RLK_HERE_PARAMETER) { return ballot(value RLK_HERE_ARGUMENT) != 0; }

}  // namespace rlk::hip
