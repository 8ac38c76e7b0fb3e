// kernels/tokens/team_sum.h computes sums by teams of threads. On CUDA a team is a warp, and a block of threads is a
// set of teams.
#pragma once

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

struct Warp {
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ bool writes() const { return true; }
  template <class T>
  __device__ __forceinline__ T shuffle_xor(T value, int mask) const {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }
};
struct WarpBlock {
  Warp warp;
  float* shared_sums;
  __device__ __forceinline__ const Warp& team() const { return warp; }
  __device__ __forceinline__ int number() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int teams() const { return blockDim.x / 32; }
  __device__ __forceinline__ void barrier() const { __syncthreads(); }
  __device__ __forceinline__ float* sums() const { return shared_sums; }
};

}  // namespace
}  // namespace rlk::cuda
