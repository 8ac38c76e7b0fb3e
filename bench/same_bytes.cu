// Compares device memory byte by byte, for programs that prove results equal.
#include <cstdint>

#include "cuda/common/launch.h"

namespace rlk::bench {
namespace {

__global__ void count_differences_kernel(const std::uint16_t* a, const std::uint16_t* b, std::int64_t size,
                                         unsigned long long* count) {
  unsigned long long mine = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    mine += a[i] != b[i];
  }
  if (mine > 0) atomicAdd(count, mine);
}

}  // namespace

// Counts the 16-bit words that differ; `bytes` is even.
std::uint64_t count_differences(const void* a, const void* b, std::int64_t bytes) {
  unsigned long long* count;
  cuda::check(cudaMalloc(&count, sizeof *count), "cudaMalloc");
  cuda::check(cudaMemset(count, 0, sizeof *count), "cudaMemset");
  count_differences_kernel<<<1024, 256>>>(static_cast<const std::uint16_t*>(a), static_cast<const std::uint16_t*>(b),
                                          bytes / 2, count);
  unsigned long long result = 0;
  cuda::check(cudaMemcpy(&result, count, sizeof result, cudaMemcpyDeviceToHost), "comparison");
  cudaFree(count);
  return result;
}

}  // namespace rlk::bench
