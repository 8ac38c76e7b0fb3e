// optimal_token_baseline on CUDA, compiled once per architecture.
#include "baseline.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void optimal_token_baseline(const OptimalTokenBaselineParams& p, cudaStream_t stream) {
  run_optimal_token_baseline<kOverlap>(p, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
