// Memory for tests that compare every kernel of an operator with the CPU, byte for byte.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/launch.h"
#include "rlk/math/half.h"

namespace rlk::cuda {

constexpr int kSkipped = 77;  // ctest takes this exit status as skipped
constexpr unsigned char kCanary = 0xcd;

inline const char* short_name(DType t) { return t == DType::kFloat32 ? "f32" : t == DType::kBFloat16 ? "bf16" : "f16"; }

struct OnDevice {
  explicit OnDevice(const std::vector<unsigned char>& host) : size(host.size()) {
    check(cudaMalloc(&data, size + 16), "cudaMalloc");
    check(cudaMemcpy(data, host.data(), size, cudaMemcpyHostToDevice), "copy");
  }
  ~OnDevice() { cudaFree(data); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  std::vector<unsigned char> host() const {
    std::vector<unsigned char> copy(size);
    check(cudaMemcpy(copy.data(), data, size, cudaMemcpyDeviceToHost), "copy");
    return copy;
  }
  void* data = nullptr;
  std::size_t size;
};

// Normal values; a few are large or small, zeros, infinities or NaN. The gaps between rows hold a canary.
inline std::vector<unsigned char> matrix(std::int64_t rows, std::int64_t columns, std::int64_t stride, DType dtype,
                                         std::mt19937* random, bool special) {
  const int bytes = size_of(dtype);
  std::vector<unsigned char> memory(static_cast<std::size_t>(rows * stride * bytes), kCanary);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < rows; ++i) {
    const bool wild = special && (*random)() % 8 == 0;
    for (std::int64_t k = 0; k < columns; ++k) {
      float x = normal(*random);
      if (wild) {
        constexpr float kValues[] = {0.0f, -0.0f, 1e-30f, -1e-6f, 3e4f, 1e20f, INFINITY, NAN};
        if ((*random)() % 16 == 0) x = kValues[(*random)() % 8];
      }
      unsigned char* to = &memory[static_cast<std::size_t>((i * stride + k) * bytes)];
      const std::uint16_t half = dtype == DType::kBFloat16 ? bf16_rn(x) : f16_rn(x);
      dtype == DType::kFloat32 ? std::memcpy(to, &x, 4) : std::memcpy(to, &half, 2);
    }
  }
  return memory;
}

inline int wrong = 0, compared = 0;

inline void expect(const std::vector<unsigned char>& got, const std::vector<unsigned char>& want,
                   const std::string& what) {
  ++compared;
  if (got == want) return;
  ++wrong;
  std::size_t i = 0;
  while (got[i] == want[i]) ++i;
  std::printf("%s: byte %zu of %zu differs\n", what.c_str(), i, got.size());
}

}  // namespace rlk::cuda
