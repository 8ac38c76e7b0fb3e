// silu_mul and gelu_mul for SM80 and later.
#include "forward.cuh"

namespace rlk::cuda {
void gated_mul_sm80(const GatedMulParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  run_forward<false>(p, plan, stream);
}
}  // namespace rlk::cuda
