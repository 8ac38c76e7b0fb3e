// importance_weights for SM80 and later.
#include "weights.cuh"

namespace rlk::cuda {
void importance_weights_sm80(const ImportanceWeightsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_importance_weights<false>(p, plan, stream);
}
}  // namespace rlk::cuda
