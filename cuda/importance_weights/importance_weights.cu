// importance_weights on CUDA, compiled once per architecture.
#include "weights.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void importance_weights(const ImportanceWeightsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_importance_weights<kOverlap>(p, plan, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
