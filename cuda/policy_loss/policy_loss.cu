// policy_loss on CUDA, compiled once per architecture.
#include "loss.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void policy_loss_alone(const PolicyLossParams& p, const TokenPlan& plan, cudaStream_t stream) {
  run_policy_loss<kOverlap>(p, plan, stream);
}
void scale_gradients(const ScaleGradientsParams& p, cudaStream_t stream) { run_scale_gradients(p, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
