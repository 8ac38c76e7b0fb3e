// silu_mul and gelu_mul for SM90.
#include "forward.cuh"

namespace rlk::cuda {
void gated_mul_sm90(const GatedMulParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  run_forward<true>(p, plan, stream);
}
}  // namespace rlk::cuda
