// silu_mul and gelu_mul backward on CUDA, compiled once per architecture.
#include "backward.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void gated_mul_backward(const GatedMulBackwardParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  run_backward<kOverlap>(p, plan, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
