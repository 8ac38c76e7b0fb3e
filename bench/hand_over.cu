// A test of racecheck: readers hand a stage of shared memory back to a copying warp. In the first kernel every reader
// arrives at the barrier. In the second kernel the readers meet at bar.sync, and one lane of each warp arrives. These
// accesses are ordered as well, since bar.sync and the arrival both release earlier accesses. racecheck reports only
// the second kernel.
//   nvcc -arch=sm_90a -std=c++20 -I. -Icpp/include bench/hand_over.cu -o hand_over
//   compute-sanitizer --tool racecheck ./hand_over
#include <cstdint>
#include <cstdio>

#include "cuda/common/async_copy_sm80.cuh"
#include "cuda/common/mbarrier_sm90.cuh"
#include "cuda/common/tma_sm90.cuh"

namespace {

using namespace rlk::cuda;

constexpr int kReaders = 256, kFloats = 64, kRounds = 64, kBytes = kFloats * 4;

template <bool kAllArrive>
__global__ void hand_over(const float* from, float* to) {
  __shared__ alignas(128) float stage[kFloats];
  __shared__ alignas(8) std::uint64_t barriers[2];
  const std::uint32_t full = shared_address(&barriers[0]), empty = shared_address(&barriers[1]);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, kAllArrive ? kReaders : kReaders / 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kReaders) {  // the copying warp
    for (int i = 0; i < kRounds; ++i) {
      mbarrier_wait_block(empty, (i & 1) ^ 1);
      if (threadIdx.x > kReaders) continue;
      mbarrier_arrive_expect(full, kBytes);
      load_bytes(shared_address(stage), from + i * kFloats, kBytes, full);
    }
    return;
  }
  float sum = 0.0f;
  for (int i = 0; i < kRounds; ++i) {
    mbarrier_wait_block(full, i & 1);
    sum += stage[threadIdx.x % kFloats];
    asm volatile("bar.sync 1, %0;" ::"n"(kReaders) : "memory");
    if (kAllArrive || threadIdx.x % 32 == 0) mbarrier_arrive(empty);
  }
  to[threadIdx.x] = sum;
}

}  // namespace

int main() {
  float *from, *to;
  cudaMalloc(&from, kRounds * kFloats * sizeof(float));
  cudaMalloc(&to, kReaders * sizeof(float));
  cudaMemset(from, 0, kRounds * kFloats * sizeof(float));
  hand_over<true><<<1, kReaders + 32>>>(from, to);
  hand_over<false><<<1, kReaders + 32>>>(from, to);
  const cudaError_t status = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(status));
  return status == cudaSuccess ? 0 : 1;
}
