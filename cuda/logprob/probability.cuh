// Probabilities of the gradient, with the hardware's or the portable exponential.
#pragma once

#include <type_traits>

#include "../common/element.cuh"
#include "kernels/vocabulary/logprob_gradient.h"

namespace rlk::cuda {

struct HardwareProbability {
  static __device__ __forceinline__ float of(float t) {
    return ex2_approx(t > 127.0f ? 127.0f : t);  // subnormal results become 0
  }
};
template <Exp kExp>
using Probability = std::conditional_t<kExp == Exp::kHardware, HardwareProbability, PortableProbability>;

}  // namespace rlk::cuda
