// Loads and stores an element of an array whose type is a run-time argument. A float32 element keeps its bits, even if
// it is NaN.
#pragma once

#include <cstdint>

#include "element.cuh"

namespace rlk::cuda {

__device__ __forceinline__ float load_element(const void* from, DType t, std::int64_t i) {
  if (t == DType::kFloat32) return static_cast<const float*>(from)[i];
  const std::uint16_t s = static_cast<const std::uint16_t*>(from)[i];
  return t == DType::kBFloat16 ? Bf16::load(s) : Fp16::load(s);
}

__device__ __forceinline__ void store_element(void* to, DType t, std::int64_t i, float x) {
  if (t == DType::kFloat32) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<std::uint16_t*>(to)[i] = t == DType::kBFloat16 ? Bf16::store(x) : Fp16::store(x);
  }
}

}  // namespace rlk::cuda
