// Device memory that the calls of a microbenchmark rotate among, so that calls find nothing in the L2.
#pragma once

#include <cstddef>

#include "bench/normal_data.h"
#include "cuda/common/launch.h"

namespace rlk::bench {

// Device memory for every buffer that calls rotate among: together the buffers exceed the L2 several times.
class Buffers {
 public:
  Buffers(std::size_t bytes, int count, DType dtype, bool filled) : bytes_(bytes), count_(count) {
    cuda::check(cudaMalloc(&memory_, bytes * count), "cudaMalloc");
    if (filled) fill_normal(memory_, bytes * count / size_of(dtype), dtype, 1.0f);
  }
  ~Buffers() { cudaFree(memory_); }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  void* at(int call) const { return static_cast<unsigned char*>(memory_) + bytes_ * (call % count_); }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_;
  int count_;
};

}  // namespace rlk::bench
