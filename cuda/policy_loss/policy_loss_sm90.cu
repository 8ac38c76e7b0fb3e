// policy_loss for SM90.
#include "loss.cuh"

namespace rlk::cuda {
void policy_loss_sm90(const PolicyLossParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_policy_loss<true>(p, plan, stream);
}
void scale_gradients_sm90(const ScaleGradientsParams& p, cudaStream_t stream) { run_scale_gradients(p, stream); }
}  // namespace rlk::cuda
