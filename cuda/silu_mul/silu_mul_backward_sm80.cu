// silu_mul and gelu_mul backward for SM80 and later.
#include "backward.cuh"

namespace rlk::cuda {
void gated_mul_backward_sm80(const GatedMulBackwardParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  run_backward<false>(p, plan, stream);
}
}  // namespace rlk::cuda
