// Label smoothing of logprob: each block sums the logits z of one row (kernels/vocabulary/logprob_smoothing.h). HBM
// limits the speed: each logit is read once (vocab_size * sizeof(T) bytes per row). All architectures share this
// source; each has its own machine code.
#include "../common/element.cuh"
#include "../common/kernels.h"
#include "../common/team.cuh"
#include "kernels/vocabulary/logprob_groups.h"
#include "kernels/vocabulary/logprob_smoothing.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

struct SmoothingBlock {
  float* shared_nodes;
  __device__ __forceinline__ int lane() const { return Warp().lane(); }
  __device__ __forceinline__ int number() const { return threadIdx.x / 32; }
  __device__ __forceinline__ float shuffle_xor(float value, int mask) const { return Warp().shuffle_xor(value, mask); }
  __device__ __forceinline__ void barrier() const { __syncthreads(); }
  __device__ __forceinline__ float* nodes() const { return shared_nodes; }
};

template <class T>
__global__ void __launch_bounds__(kSmoothingThreads)
    logprob_smoothing_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid) {
  __shared__ float nodes[kMostSmoothingNodes];
  smooth_row<T>(SmoothingBlock{nodes}, p, grid, blockIdx.x);
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void logprob_smoothing(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  auto* kernel = p.dtype == DType::kFloat32    ? logprob_smoothing_kernel<Fp32>
                 : p.dtype == DType::kBFloat16 ? logprob_smoothing_kernel<Bf16>
                                               : logprob_smoothing_kernel<Fp16>;
  kernel<<<static_cast<unsigned>(p.num_rows), kSmoothingThreads, 0, stream>>>(p, grid);
  check(cudaGetLastError(), "launch of logprob_smoothing");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
