// Access to single elements of outputs and biases, whose type is known only at run time.
#pragma once

#include "hip/common/element.h"
#include "hip/common/wave.h"

namespace rlk::hip {

RLK_DEVICE float load_element(const void* array, DType t, std::int64_t i) {
  if (t == DType::kFloat32) return global_pointer(static_cast<const float*>(array))[i];
  const std::uint16_t half = global_pointer(static_cast<const std::uint16_t*>(array))[i];
  return t == DType::kBFloat16 ? Bf16::load(half) : Fp16::load(half);
}
RLK_DEVICE void store_element(void* array, DType t, std::int64_t i, float x) {
  if (t == DType::kFloat32) {
    global_pointer(static_cast<float*>(array))[i] = Fp32::store(x);
  } else {
    global_pointer(static_cast<std::uint16_t*>(array))[i] = t == DType::kBFloat16 ? Bf16::store(x) : Fp16::store(x);
  }
}

}  // namespace rlk::hip
