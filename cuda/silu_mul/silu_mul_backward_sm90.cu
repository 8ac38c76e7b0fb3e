// silu_mul and gelu_mul backward for SM90.
#include "backward.cuh"

namespace rlk::cuda {
void gated_mul_backward_sm90(const GatedMulBackwardParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  run_backward<true>(p, plan, stream);
}
}  // namespace rlk::cuda
