// silu_mul and gelu_mul on CUDA, compiled once per architecture.
#include "forward.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void gated_mul(const GatedMulParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  run_forward<kOverlap>(p, plan, stream);
}
}  // namespace rlk::cuda::RLK_CUDA_ARCH
