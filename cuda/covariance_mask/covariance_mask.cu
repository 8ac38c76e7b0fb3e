// covariance_mask on CUDA, compiled once per architecture.
#include "select.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void covariance_mask(const CovarianceMaskParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_covariance_mask<kOverlap>(p, plan, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
