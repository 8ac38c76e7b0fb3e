// Device memory for the microbenchmarks with normally distributed values, as activations, weights and logits have.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "cuda/common/launch.h"
#include "rlk/math/half.h"

namespace rlk::bench {

// 4 Mi values of N(0, deviation^2). With a spread each is scaled by 2^x, x ~ N(0, spread^2), so that a sum depends more on
// its order. Made once.
inline const std::vector<std::uint8_t>& normal_pattern(DType dtype, float deviation, float spread) {
  constexpr std::size_t kSize = (4 << 20) - 11;  // odd: no two rows alike
  static std::map<std::tuple<DType, float, float>, std::vector<std::uint8_t>> patterns;
  std::vector<std::uint8_t>& pattern = patterns[{dtype, deviation, spread}];
  if (!pattern.empty()) return pattern;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  pattern.resize(kSize * size_of(dtype));
  for (std::size_t i = 0; i < kSize; ++i) {
    float x = deviation * normal(random);
    if (spread > 0) x *= std::exp2(spread * normal(random));
    if (dtype == DType::kFloat32) {
      std::memcpy(&pattern[4 * i], &x, 4);
    } else {
      const std::uint16_t h = dtype == DType::kBFloat16 ? bf16_rn(x) : f16_rn(x);
      std::memcpy(&pattern[2 * i], &h, 2);
    }
  }
  return pattern;
}

// Repeats the pattern over a buffer.
inline void fill_normal(void* device, std::size_t elements, DType dtype, float deviation, float spread = 0) {
  const std::vector<std::uint8_t>& pattern = normal_pattern(dtype, deviation, spread);
  auto* bytes = static_cast<std::uint8_t*>(device);
  const std::size_t size = elements * size_of(dtype), first = std::min(size, pattern.size());
  cuda::check(cudaMemcpy(bytes, pattern.data(), first, cudaMemcpyHostToDevice), "copy");
  for (std::size_t done = first; done < size; done += first) {
    const std::size_t more = std::min(first, size - done);
    cuda::check(cudaMemcpy(bytes + done, bytes, more, cudaMemcpyDeviceToDevice), "copy");
  }
}

}  // namespace rlk::bench
