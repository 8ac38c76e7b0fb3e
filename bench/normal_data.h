// Device memory for the microbenchmarks: normally distributed, as activations, weights and logits are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/common/launch.h"
#include "rlk/math/half.h"

namespace rlk::bench {

// N(0, deviation^2): a pattern of 4 Mi values repeated over the buffer.
inline void fill_normal(void* device, std::size_t elements, DType dtype, float deviation) {
  constexpr std::size_t kPattern = (4 << 20) - 11;  // odd: no two rows alike
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, deviation);
  const std::size_t n = std::min(elements, kPattern);
  std::vector<std::uint8_t> host(n * size_of(dtype));
  for (std::size_t i = 0; i < n; ++i) {
    const float x = normal(random);
    if (dtype == DType::kFloat32) {
      std::memcpy(&host[4 * i], &x, 4);
    } else {
      const std::uint16_t h = dtype == DType::kBFloat16 ? bf16_rn(x) : f16_rn(x);
      std::memcpy(&host[2 * i], &h, 2);
    }
  }
  auto* bytes = static_cast<std::uint8_t*>(device);
  cuda::check(cudaMemcpy(bytes, host.data(), host.size(), cudaMemcpyHostToDevice), "copy");
  for (std::size_t done = n; done < elements; done += n) {
    const std::size_t more = std::min(n, elements - done) * size_of(dtype);
    cuda::check(cudaMemcpy(bytes + done * size_of(dtype), bytes, more, cudaMemcpyDeviceToDevice), "copy");
  }
}

}  // namespace rlk::bench
