// covariance_mask for SM90.
#include "select.cuh"

namespace rlk::cuda {
void covariance_mask_sm90(const CovarianceMaskParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_covariance_mask<true>(p, plan, stream);
}
}  // namespace rlk::cuda
