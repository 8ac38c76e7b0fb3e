// importance_weights for SM90.
#include "weights.cuh"

namespace rlk::cuda {
void importance_weights_sm90(const ImportanceWeightsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_importance_weights<true>(p, plan, stream);
}
}  // namespace rlk::cuda
