// covariance_mask for SM80 and later.
#include "select.cuh"

namespace rlk::cuda {
void covariance_mask_sm80(const CovarianceMaskParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_covariance_mask<false>(p, plan, stream);
}
}  // namespace rlk::cuda
