// policy_loss for SM80 and later.
#include "loss.cuh"

namespace rlk::cuda {
void policy_loss_sm80(const PolicyLossParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_policy_loss<false>(p, plan, stream);
}
void scale_gradients_sm80(const ScaleGradientsParams& p, cudaStream_t stream) { run_scale_gradients(p, stream); }
}  // namespace rlk::cuda
