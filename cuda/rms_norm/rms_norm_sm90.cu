// rms_norm forward for SM90.
#include "forward.cuh"

namespace rlk::cuda {
void rms_norm_sm90(const RmsNormParams& p, const RmsNormPlan& plan, cudaStream_t stream) {
  run_forward<true>(p, plan, stream);
}
}  // namespace rlk::cuda
