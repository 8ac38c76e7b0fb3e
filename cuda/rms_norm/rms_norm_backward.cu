// rms_norm backward on CUDA, compiled once per architecture.
#include "backward.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void rms_norm_backward(const RmsNormBackwardParams& p, const RmsNormBackwardPlan& plan, cudaStream_t stream) {
  run_backward<kOverlap>(p, plan, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
