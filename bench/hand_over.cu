// Tests of racecheck, in two pairs of kernels. All accesses of these kernels are ordered.
// hand_over: readers hand a stage of shared memory back to a copying warp. If every reader arrives at the barrier,
// racecheck reports nothing. If the readers meet at bar.sync, and one lane of each warp arrives, racecheck reports
// races.
// read_after_meeting: the blocks of a cluster write to each other's shared memory and meet at the cluster's barrier.
// Then one warp reads. If this warp arrives at the barrier's next phase before it reads, racecheck reports races.
//   nvcc -arch=sm_90a -std=c++20 -I. -Icpp/include bench/hand_over.cu -o hand_over
//   compute-sanitizer --tool racecheck ./hand_over
#include <cstdint>
#include <cstdio>

#include "cuda/common/async_copy_sm80.cuh"
#include "cuda/common/cluster_sm90.cuh"
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

constexpr int kBlocks = 8, kPairs = 32;

// Warp 0 reads values that every block wrote before the cluster's barrier. The other warps meet once more meanwhile.
template <bool kArrivesFirst>
__global__ void __cluster_dims__(kBlocks) read_after_meeting(float* to) {
  __shared__ float2 values[kBlocks * kPairs];
  const std::uint32_t rank = cluster_rank();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  cluster_arrive();
  cluster_wait();  // every block has begun
  if (warp > 0 && lane < kBlocks) {
    const std::uint32_t own = shared_address(values + rank * kPairs + warp);
    store_remote_8(map_to_rank(own, lane), make_float2(static_cast<float>(rank), static_cast<float>(warp)));
  }
  cluster_arrive();
  cluster_wait();  // every block has written
  float sum = 0.0f;
  if (warp == 0) {
    if (kArrivesFirst) cluster_arrive();
#pragma unroll 1
    for (int i = 0; i < kBlocks; ++i) {
      if (lane > 0 && lane < static_cast<int>(blockDim.x) / 32) sum += values[i * kPairs + lane].x;
      __nanosleep(1000);
    }
    if (!kArrivesFirst) cluster_arrive();
    cluster_wait();
    cluster_arrive();
  } else {
    cluster_arrive();
    cluster_wait();
    cluster_arrive_relaxed();
  }
  cluster_wait();
  to[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

}  // namespace

int main() {
  float *from, *to;
  cudaMalloc(&from, kRounds * kFloats * sizeof(float));
  cudaMalloc(&to, kBlocks * kReaders * sizeof(float));
  cudaMemset(from, 0, kRounds * kFloats * sizeof(float));
  hand_over<true><<<1, kReaders + 32>>>(from, to);
  hand_over<false><<<1, kReaders + 32>>>(from, to);
  read_after_meeting<false><<<kBlocks, kReaders>>>(to);
  read_after_meeting<true><<<kBlocks, kReaders>>>(to);
  const cudaError_t status = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(status));
  return status == cudaSuccess ? 0 : 1;
}
