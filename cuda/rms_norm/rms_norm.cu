// rms_norm forward on CUDA, compiled once per architecture.
#include "forward.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void rms_norm(const RmsNormParams& p, const RmsNormPlan& plan, cudaStream_t stream) {
  run_forward<kOverlap>(p, plan, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
