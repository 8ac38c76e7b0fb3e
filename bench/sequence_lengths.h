// Ragged batches, and the report row of microbenchmarks of operators over sequences.
#pragma once

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/launch.h"

namespace rlk::bench {

// Offsets of lengths that are uniform in [0, columns].
inline std::vector<std::int32_t> ragged_offsets(std::int64_t rows, std::int64_t columns) {
  std::mt19937 random(1);
  std::vector<std::int32_t> offsets = {0};
  for (std::int64_t i = 0; i < rows; ++i) {
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(random() % static_cast<unsigned>(columns + 1)));
  }
  return offsets;
}

template <class T>
T* on_device(const std::vector<T>& values) {
  void* memory;
  cuda::check(cudaMalloc(&memory, values.size() * sizeof(T)), "cudaMalloc");
  cuda::check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return static_cast<T*>(memory);
}

inline void print_row(const std::string& what, double us, double bytes, double ceiling) {
  std::printf("%-60s %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy\n", what.c_str(), us, bytes / 1e6, bytes / us / 1e6,
              100 * bytes / (us * 1e-6) / ceiling);
  std::fflush(stdout);
}

}  // namespace rlk::bench
